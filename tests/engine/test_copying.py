"""Copies of parked messages: from the bytes of a park, and from what it is taken apart into."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.tables.topics import Topic
from metaq.engine.timers.copying import Copying, size_of
from metaq.engine.writing import Draft, stage
from metaq.message import TopicPartition
from metaq.protocol import properties
from metaq.protocol.record import decode_record
from metaq.store.newrecord import Fields
from metaq.timers.records import PARKS, properties_of_park
from tests.support.inprocess import Parts

PLACE: Final = properties_of_park(1_700_000_000_000, "orders", 2)
PAIRS: Final = {"TIMER_DELIVER_MS": "1700000000000", "colour": "blå"}


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path / "data")
    parts.context.topics.put(Topic("orders", 4, 4))
    yield parts
    parts.close()


def copies(parts: Parts, pairs: dict[str, str], dropped: list[str]) -> tuple[list[Fields], list[Fields]]:
    """Return the copies of a park with these properties: made as deliveries make them, and taken apart."""
    draft = Draft(*PARKS, b"body", pairs, flag=3, sys_flag=1, born_ms=5, born_host=b"\1\2\3\4\0\0\0\5", reconsume_times=2)
    place = stage(parts.context, draft).log_offset
    parts.store.append()
    park = parts.store.log.record_at(place)
    assert park is not None
    copying = Copying(parts.context)
    record = decode_record(bytes(park.buffer[park.at : park.at + park.size]))
    return copying.copy(park, lambda _, why: dropped.append(why)), copying.copy_apart(record, lambda *_: None)


@pytest.mark.parametrize(
    "pairs",
    [
        PAIRS | PLACE,
        PLACE,
        PAIRS | {"TAGS": "blue", "KEYS": "k1 k2", "UNIQ_KEY": "U"} | PLACE,
        {"XREAL_TOPIC": "other"} | PAIRS | PLACE,
        {"TIMER_DEQUEUE_MS": "1", "TIMER_ENQUEUE_MS": "2"} | PAIRS | PLACE,
        PAIRS | {"x": "y" * 30_000} | PLACE,
        PAIRS | properties_of_park(1, "orders", 7),
    ],
    ids=["some", "none", "looked up", "like a place", "copied before", "long", "of a topic that has shrunk"],
)
def test_both_ways_make_the_same_copy(parts: Parts, pairs: dict[str, str]) -> None:
    """ES-008, T-1: with all that the message had but its place."""
    quick, apart = copies(parts, pairs, [])
    assert [tuple(copy) for copy in quick] == [tuple(copy) for copy in apart]
    ((queue, _, body, _, _, _, tail, *_),) = quick
    assert (queue.topic, body) == ("orders", b"body")
    assert tail is not None
    assert b"TIMER_OUT_MS\x01" in tail
    assert b"\x02REAL_TOPIC\x01" not in tail
    assert size_of(quick[0]) == 88 + 4 + len(tail) + 20


def test_a_copy_of_a_deleted_topic_is_dropped(parts: Parts) -> None:
    parts.context.topics.delete("orders", {TopicPartition("orders", 0): 0})
    dropped: list[str] = []
    assert copies(parts, PAIRS | PLACE, dropped)[0] == []
    assert dropped == ["the topic orders was deleted"]


def test_a_copy_whose_properties_become_too_long_is_dropped(parts: Parts) -> None:
    dropped: list[str] = []
    room = properties.MOST_BYTES - len(properties.encode({"x": ""} | PLACE))
    assert copies(parts, {"x": "y" * room} | PLACE, dropped)[0] == []
    assert "longer than" in dropped[0]


def test_a_topic_with_priorities_decides_by_the_whole_message(parts: Parts) -> None:
    """MY-018: the priority counts that the message has when it is delivered."""
    attributes = {"message.type": "PRIORITY"}
    parts.context.topics.put(Topic("orders", 4, 4, attributes=attributes))
    quick, _ = copies(parts, PAIRS | {"_SYS_MSG_PRIORITY_": "3"} | PLACE, [])
    assert quick[0][0].partition == 3
