"""The answer to a bulk fetch, byte by byte: a message, one that is lost, and the first one's record."""

from typing import Final

from metaq.protocol.record import decode_record, java_hash
from metaq.protocol.remoting.bulk import MISSING, BulkFetch, are_intact, decode_bulk, encode_bulk_head, unit_columns
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header

HEAD: Final = bytes.fromhex(
    "00000002"
    "0000000000001000 00000084 0027a807"  # at 4096 in the log, 132 bytes, tag TagA
    "0000000000000000 00000000 00000000"
)
RECORD: Final = bytes.fromhex(
    "00000084 daa320a7 3610a686 00000002 00000000 0000000000000029 0000000000001000 00000000 00000145f680b000"
    "0a00000900009c40 00000145f680b001 0a00000100001fbb 00000000 0000000000000000 00000005 68656c6c6f"
    "06 546f70696341 001e 5441475301 5461674102 5f5f435243333223 01 3939323438373339303202"
)
FIELDS: Final = {"nextBeginOffset": "43", "minOffset": "40", "maxOffset": "50"}


def test_the_body() -> None:
    """P47: as docs/remoting.md has it."""
    assert encode_bulk_head(HEAD[4:]) == HEAD
    bulk = decode_bulk(41, FIELDS, HEAD + RECORD)
    assert (bulk.first, bulk.next, bulk.least, bulk.most) == (41, 43, 40, 50)
    assert (bytes(bulk.units), bytes(bulk.records), bulk.verified) == (HEAD[4:], RECORD, False)
    assert not decode_bulk(41, {**FIELDS, "verified": "false"}, HEAD + RECORD).verified
    assert decode_bulk(41, {**FIELDS, "verified": "true"}, HEAD + RECORD).verified
    assert bulk.units[16:] == MISSING
    offsets, sizes = unit_columns(bulk.units)
    assert (list(offsets), list(sizes), java_hash("TagA")) == ([4096, 0], [132, 0], 0x27A807)
    record = decode_record(bulk.records)
    assert (record.topic, record.partition, record.queue_offset, bytes(record.body)) == ("TopicA", 2, 41, b"hello")
    assert are_intact(RECORD, [0], [4096], [132], "TopicA", 2, 41)


def test_the_request() -> None:
    """P47: its code and the names of its fields."""
    fields = {"topic": "TopicA", "queueId": "2", "queueOffset": "41", "maxMsgNums": "1000", "maxBytes": "8388608"}
    wanted = BulkFetch("TopicA", Int32(2), 41, Int32(1000), Int32(8 << 20))
    assert encode_header(wanted) == {**fields, "verified": "true"}
    assert encode_header(wanted._replace(verified=False)) == {**fields, "verified": "false"}
    assert decode_header(BulkFetch, fields) == wanted
    assert int(Request.BULK_FETCH) == 30030
