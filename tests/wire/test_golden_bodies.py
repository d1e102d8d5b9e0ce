"""Golden vectors of the remoting protocol (specs: remoting protocol, section 7) that are bodies, ids and hashes.

The tests of frames contain the whole frames. A body arrives whole, so these tests try every body that is cut short.
"""

from typing import Final

import pytest

from metaq.errors import BadRequest, MessageIllegal
from metaq.message import LogOffset, MessageQueue
from metaq.protocol.ids import OffsetId, decode_offset_id, encode_offset_id
from metaq.protocol.record import java_hash
from metaq.protocol.remoting.fastjson import decode, encode
from metaq.protocol.remoting.sending.batch import BatchItem, decode_batch, encode_batch
from metaq.protocol.subscription import parse_subscription

G11: Final = bytes.fromhex("000000180000000000000000000000000000000262310000000000180000000000000000000000000000000262320000")
G20: Final = "7F00000100002A9F00000000000009F9"
G21: Final = "FD00000000000000000000000000000100002A9F00000000000009F9"
G36: Final = bytes.fromhex(
    "7b22636c69656e744964223a223139322e302e322e32406f726431222c22636f6e73756d657247726f7570223a2243475f4f222c226d7153"
    "6574223a5b7b2262726f6b65724e616d65223a2262726f6b65722d61222c2271756575654964223a332c22746f706963223a22546f706963"
    "41227d5d7d"
)
G37: Final = {
    "TagA": 2598919,
    "TagB": 2598920,
    "TopicA#k3": -1903240647,
    "中文": 646394,
    "polygenelubricants": -2147483648,
}

LOCKS: Final = {"clientId": "192.0.2.2@ord1", "consumerGroup": "CG_O", "mqSet": [MessageQueue("TopicA", "broker-a", 3)]}


def test_g11_a_batch_of_the_go_client() -> None:
    """Every shorter one that does not end between two messages is refused."""
    items = [BatchItem(0, b"b1", ""), BatchItem(0, b"b2", "")]
    assert encode_batch(items) == G11
    for end in range(len(G11) + 1):
        if end % 24 == 0:
            assert list(decode_batch(G11[:end])) == items[: end // 24]
        else:
            with pytest.raises(MessageIllegal, match=f"message at byte {end // 24 * 24} of a batch of {end}"):
                list(decode_batch(G11[:end]))


@pytest.mark.parametrize(("text", "address"), [(G20, "127.0.0.1"), (G21, "fd00::1")])
def test_g20_and_g21_offset_ids(text: str, address: str) -> None:
    """RD-106: and every shorter text is no id."""
    where = OffsetId(address, 10911, LogOffset(2553))
    assert encode_offset_id(where) == text
    assert decode_offset_id(text) == where
    for end in range(len(text)):
        if end != len(G20):
            with pytest.raises(BadRequest, match="not 32 or 56 hexadecimal digits"):
                decode_offset_id(text[:end])


def test_g36_the_body_of_a_lock_request() -> None:
    """Byte for byte as Java writes it; every shorter one is refused."""
    assert encode(LOCKS) == G36
    assert decode(G36) == {**LOCKS, "mqSet": [{"brokerName": "broker-a", "queueId": 3, "topic": "TopicA"}]}
    for end in range(len(G36)):
        with pytest.raises(BadRequest, match=r"not the end|closing quote"):
            decode(G36[:end])


@pytest.mark.parametrize("text", G37)
def test_g37_hashes(text: str) -> None:
    """RD-027: of tags, as index units keep them."""
    assert java_hash(text) == G37[text]
    assert parse_subscription("TopicA", f"TagC || {text}").matches_code(G37[text])
