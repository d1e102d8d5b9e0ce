"""Golden vectors of the remoting protocol (specs: remoting protocol, section 7) that are frames and stored messages.

G11, G20, G21, G36 and G37 stand in ``test_golden_bodies``, G22 and G23 with the key index, G32 and G33 with routes, G38 with
the strategies of allocation. G16 to G19 are units of 20 bytes; this store's have 16. G24 to G31 and G39 belong to replication,
users and the timer wheel of 5.x brokers.
"""

from typing import Final, NamedTuple

import pytest

from metaq.client.consuming.records import decode_messages
from metaq.errors import ChecksumMismatch, StreamLost
from metaq.protocol.properties import parse
from metaq.protocol.record import BLANK, BLANK_MAGIC, checksum_property, decode_properties
from metaq.protocol.remoting.codes import COMPACT, JSON, ONEWAY_FLAG, RESPONSE_FLAG, Request, Response
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request, encode_response
from metaq.protocol.remoting.headers import EndTransaction, SendMessage, decode_header, with_names
from tests.support.wire import feed, slicings

FRAMES: Final = {
    "G1": (
        "00000084000000807b22636f6465223a3130352c226578744669656c6473223a7b22746f706963223a22544257313032227d2c22666c6167"
        "223a302c226c616e6775616765223a224a415641222c226f7061717565223a302c2273657269616c697a655479706543757272656e745250"
        "43223a224a534f4e222c2276657273696f6e223a3430397d"
    ),
    "G2": (
        "00000064000000607b22636f6465223a302c22666c6167223a312c226c616e6775616765223a224a415641222c226f7061717565223a3135"
        "2c2273657269616c697a655479706543757272656e74525043223a224a534f4e222c2276657273696f6e223a3430397d"
    ),
    "G3": "0000002a010000260069000199000000000000000000000000000000110005746f70696300000006546f70696341",
    "G4": (
        "0000007d0100007900130001990000003000000001000000134f46465345545f4f564552464c4f575f4f4e45000000510014737567676573"
        "74576869636842726f6b657249640000000130000f6e657874426567696e4f6666736574000000013100096d61784f666673657400000001"
        "3100096d696e4f66667365740000000130"
    ),
    "G5": "0000001901000015fc18000199fffffffb000000010000000000000000",
    "G6": (
        "0000018a000001817b22636f6465223a3331302c226578744669656c6473223a7b2261223a2250475f41222c2262223a22546f7069634122"
        "2c2263223a22544257313032222c2264223a2234222c2265223a2232222c2266223a2230222c2267223a2231373935323537333433333734"
        "222c2268223a2230222c2269223a224b4559535c75303030316b31206b325c7530303032554e49515f4b45595c7530303031464430303030"
        "30303030303030303030303030303030303030303030303030323439323435464644324232373639343533353845303030305c7530303032"
        "574149545c7530303031747275655c7530303032544147535c753030303154616741222c226a223a2230222c226b223a2266616c7365222c"
        "226d223a2266616c7365222c226e223a2262726f6b65722d61227d2c22666c6167223a302c226c616e6775616765223a224a415641222c22"
        "6f7061717565223a362c2273657269616c697a655479706543757272656e74525043223a224a534f4e222c2276657273696f6e223a343039"
        "7d68656c6c6f"
    ),
    "G7": (
        "000000eb000000e77b22636f6465223a302c226578744669656c6473223a7b2271756575654964223a2232222c2254524143455f4f4e223a"
        "2274727565222c224d53475f524547494f4e223a2244656661756c74526567696f6e222c226d73674964223a223746303030303031303030"
        "303241394630303030303030303030303030303030222c2271756575654f6666736574223a2230227d2c22666c6167223a312c226c616e67"
        "75616765223a224a415641222c226f7061717565223a362c2273657269616c697a655479706543757272656e74525043223a224a534f4e22"
        "2c2276657273696f6e223a3430397d"
    ),
    "G8": (
        "000000cf000000cb7b22636f6465223a31352c226578744669656c6473223a7b2271756575654964223a2233222c22626e616d65223a2262"
        "726f6b65722d61222c22636f6d6d69744f6666736574223a2231222c22746f706963223a22546f70696341222c22636f6e73756d65724772"
        "6f7570223a2243475f41227d2c22666c6167223a322c226c616e6775616765223a224a415641222c226f7061717565223a35322c22736572"
        "69616c697a655479706543757272656e74525043223a224a534f4e222c2276657273696f6e223a3430397d"
    ),
    "G9": (
        "0000008a000000867b22636f6465223a34302c226578744669656c6473223a7b22636f6e73756d657247726f7570223a2243475f41227d2c"
        "22666c6167223a322c226c616e6775616765223a224a415641222c226f7061717565223a33332c2273657269616c697a6554797065437572"
        "72656e74525043223a224a534f4e222c2276657273696f6e223a3430397d"
    ),
    "G10": (
        "000000df000000d07b22636f6465223a3331302c226c616e6775616765223a224a415641222c226f7061717565223a31322c22666c616722"
        "3a302c2276657273696f6e223a3132312c226578744669656c6473223a7b2261223a225049445f4e4f4445222c2262223a224e6f6465546f"
        "706963222c2263223a22544257313032222c2264223a342c2265223a302c2266223a302c2267223a313739353235373835373737392c2268"
        "223a302c2269223a22544147535c75303030316e756c6c5c7530303032222c226a223a302c226b223a66616c73657d7d6e6f207461672062"
        "6f6479"
    ),
    "G35": (
        "00000149000001457b22636f6465223a33372c226578744669656c6473223a7b2270726f647563657247726f7570223a2250475f54222c22"
        "626e616d65223a2262726f6b65722d61222c22636f6d6d69744c6f674f6666736574223a2232353533222c226d73674964223a2246443030"
        "30303030303030303030303030303030303030303030303030303032344539393546464432423237363934363734413030303030222c2274"
        "72616e53746174655461626c654f6666736574223a2230222c22636f6d6d69744f72526f6c6c6261636b223a2238222c2266726f6d547261"
        "6e73616374696f6e436865636b223a2266616c7365227d2c22666c6167223a322c226c616e6775616765223a224a415641222c226f706171"
        "7565223a382c2273657269616c697a655479706543757272656e74525043223a224a534f4e222c2276657273696f6e223a3430397d"
    ),
}
RECORDS: Final = {
    "G12": (
        "000000d3daa320a73610a68600000002000000000000000000000000000000000000000000000000000001a1fdad1d8e7f0000010000b612"
        "000001a1fdad1de17f00000100002a9f0000000000000000000000000000000568656c6c6f06546f70696341006d4b455953016b31206b32"
        "02554e49515f4b45590146443030303030303030303030303030303030303030303030303030303030323439323435464644324232373639"
        "3435333538453030303002434c55535445520144656661756c74436c757374657202544147530154616741"
    ),
    "G13": (
        "000000e7daa320ab706b9d0f000000010000000000000000000000070000000000001000000000000000018bcfe568007f0000010000b612"
        "0000018bcfe568017f00000100002a9f00000000000000000000000000000002763200825454545454545454545454545454545454545454"
        "5454545454545454545454545454545454545454545454545454545454545454545454545454545454545454545454545454545454545454"
        "5454545454545454545454545454545454545454545454545454545454545454545454545454545454545454545454545454545454540007"
        "54414753016102"
    ),
    "G14": (
        "00000082daa320a777065916000000000000000000000000000000000000000000000000000000300000018bcfe56800fd00000000000000"
        "00000000000000020000c3500000018bcfe56801fd00000000000000000000000000000100002a9f00000000000000000000000000000002"
        "763606546f70696341000754414753016102"
    ),
}
G15: Final = bytes.fromhex("00000064cbd43194")
G34: Final = bytes.fromhex("5f5f435243333223013039383736353433323102")

PRODUCED: Final = (
    "KEYS\x01k1 k2\x02UNIQ_KEY\x01FD00000000000000000000000000000249245FFD2B276945358E0000\x02WAIT\x01true\x02TAGS\x01TagA"
)
SENT: Final = {
    "queueId": "2",
    "TRACE_ON": "true",
    "MSG_REGION": "DefaultRegion",
    "msgId": "7F00000100002A9F0000000000000000",
    "queueOffset": "0",
}


def frame(
    code: int,
    opaque: int,
    fields: dict[str, str] | None = None,
    body: bytes = b"",
    *,
    flag: int = 0,
    remark: str | None = None,
    version: int = 409,
    serialization: int = JSON,
) -> RemotingCommand:
    return RemotingCommand(code, opaque, flag, fields or {}, body, remark, "JAVA", version, serialization)


PULLED: Final = {"suggestWhichBrokerId": "0", "nextBeginOffset": "1", "maxOffset": "1", "minOffset": "0"}
G6_FIELDS: Final = {
    **dict(zip("abcdefgh", ("PG_A", "TopicA", "TBW102", "4", "2", "0", "1795257343374", "0"), strict=True)),
    **dict(zip("ijkmn", (PRODUCED, "0", "false", "false", "broker-a"), strict=True)),
}
G8_FIELDS: Final = {"queueId": "3", "bname": "broker-a", "commitOffset": "1", "topic": "TopicA", "consumerGroup": "CG_A"}
G10_FIELDS: Final = {
    **dict(zip("abcdefgh", ("PID_NODE", "NodeTopic", "TBW102", "4", "0", "0", "1795257857779", "0"), strict=True)),
    "i": "TAGS\x01null\x02",
    "j": "0",
    "k": "false",
}
G35_FIELDS: Final = {
    "producerGroup": "PG_T",
    "bname": "broker-a",
    "commitLogOffset": "2553",
    "msgId": "FD0000000000000000000000000000024E995FFD2B27694674A00000",
    "tranStateTableOffset": "0",
    "commitOrRollback": "8",
    "fromTransactionCheck": "false",
}
MEANT: Final = {
    "G1": frame(Request.GET_ROUTEINFO_BY_TOPIC, 0, {"topic": "TBW102"}),
    "G2": frame(Response.SUCCESS, 15, flag=RESPONSE_FLAG),
    "G3": frame(Request.GET_ROUTEINFO_BY_TOPIC, 0, {"topic": "TopicA"}, serialization=COMPACT),
    "G4": frame(19, 48, PULLED, flag=RESPONSE_FLAG, remark="OFFSET_OVERFLOW_ONE", serialization=COMPACT),
    "G5": frame(-1000, -5, flag=RESPONSE_FLAG, serialization=COMPACT),
    "G6": frame(Request.SEND_MESSAGE_V2, 6, G6_FIELDS, b"hello"),
    "G7": frame(Response.SUCCESS, 6, SENT, flag=RESPONSE_FLAG),
    "G8": frame(Request.UPDATE_CONSUMER_OFFSET, 52, G8_FIELDS, flag=ONEWAY_FLAG),
    "G9": frame(Request.NOTIFY_CONSUMER_IDS_CHANGED, 33, {"consumerGroup": "CG_A"}, flag=ONEWAY_FLAG),
    "G10": frame(Request.SEND_MESSAGE_V2, 12, G10_FIELDS, b"no tag body", version=121),
    "G35": frame(Request.END_TRANSACTION, 8, G35_FIELDS, flag=ONEWAY_FLAG),
}
FOREIGN: Final = frozenset(("G10",))
"""Written by a client that writes headers in another way than Java."""


@pytest.mark.parametrize("name", FRAMES)
def test_a_golden_frame_is_read_however_it_is_cut(name: str) -> None:
    """SG-096, SG-093, RD-020, RD-021: also twice in a row; of a part of it nothing is read."""
    data = bytes.fromhex(FRAMES[name])
    for way, pieces in slicings(data + data, seed=0):
        reader = FrameReader()
        assert feed(reader.receive, pieces) == [MEANT[name]] * 2, way
        assert reader.error is None
    for end in range(len(data)):
        reader = FrameReader()
        assert reader.receive(data[:end]) == []
        assert reader.error is None


def test_golden_frames_are_read_one_behind_the_other() -> None:
    """SG-096, SG-097: requests and responses in both serializations over one connection."""
    data = b"".join(map(bytes.fromhex, FRAMES.values()))
    for way, pieces in slicings(data, seed=0):
        assert feed(FrameReader().receive, pieces) == list(MEANT.values()), way


@pytest.mark.parametrize("name", [name for name in FRAMES if name not in FOREIGN])
def test_a_golden_frame_is_written(name: str) -> None:
    """SG-096, RD-019, RD-021: byte for byte."""
    meant = MEANT[name]
    fields = meant.fields or None
    if meant.is_response:
        written = encode_response(meant, meant.code, fields, meant.remark)
    else:
        oneway, serialization = meant.is_oneway, meant.serialization
        written = encode_request(meant.code, meant.opaque, fields, meant.body, oneway=oneway, serialization=serialization)
    assert written.hex() == FRAMES[name]


def test_the_headers_of_golden_frames() -> None:
    """SG-096, RD-019: what their fields mean."""
    send = decode_header(SendMessage, with_names(MEANT["G6"].fields))
    assert send[:8] == ("PG_A", "TopicA", "TBW102", 4, 2, 0, 1795257343374, 0)
    assert parse(send.properties or "")["TAGS"] == "TagA"
    assert decode_header(SendMessage, with_names(MEANT["G10"].fields)).unit_mode is False
    end = decode_header(EndTransaction, MEANT["G35"].fields)
    assert (end.commit_log_offset, end.commit_or_rollback, end.from_transaction_check) == (2553, 8, False)


class Meant(NamedTuple):
    """The contents of a golden record."""

    body: bytes
    topic: str
    partition: int
    queue_offset: int
    log_offset: int
    tag: str | None


STORED: Final = {
    "G12": Meant(b"hello", "TopicA", 2, 0, 0, "TagA"),
    "G13": Meant(b"v2", "T" * 130, 1, 7, 4096, "a"),
    "G14": Meant(b"v6", "TopicA", 0, 0, 0, "a"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_golden_record_is_read(name: str) -> None:
    """SG-016: by our client from any broker: long topics and IPv6 hosts too; of a part of it nothing is taken."""
    data = bytes.fromhex(RECORDS[name])
    for topic in ("", "TopicA"):
        for message in decode_messages(data * 2, "broker-a", topic):
            queue, place = message.queue, (message.queue_offset, message.log_offset)
            assert Meant(message.body, queue.topic, queue.partition, *place, message.tag) == STORED[name]
    for end in range(1, len(data)):
        with pytest.raises((StreamLost, ChecksumMismatch)):
            decode_messages(data[:end], "broker-a")


def test_g15_the_blank_record() -> None:
    """SG-017: all bytes that remain in the file, and its own magic."""
    assert BLANK.unpack(G15) == (100, BLANK_MAGIC)


def test_g34_the_checksum_property() -> None:
    """SG-018: its digits, the least significant first."""
    assert decode_properties(G34) == {"__CRC32#": "0987654321"}
    found = decode_properties(checksum_property(b"hello"))["__CRC32#"]
    assert int(found[::-1]) == 0x3610A686
