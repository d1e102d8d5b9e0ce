"""Bodies for administrators: they are as RocketMQ writes them, and no input breaks the reader."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import BadRequest
from metaq.message import MessageQueue
from metaq.protocol.remoting.adminbodies import (
    ConsumeStats,
    QueueProgress,
    QueueSpan,
    decode_offsets,
    decode_settings,
    encode_all_consume_stats,
    encode_consume_stats,
    encode_consumer_status,
    encode_corrections,
    encode_offset_list,
    encode_offsets,
    encode_settings,
    encode_topic_stats,
)

QUEUE = MessageQueue("TopicA", "broker-a", 3)
KEY = b'{"brokerName":"broker-a","queueId":3,"topic":"TopicA"}'

names = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=8)
queues = st.builds(MessageQueue, names, names, st.integers(0, 1023))
offsets = st.dictionaries(queues, st.integers(-1, (1 << 63) - 1))
lines = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="=#"), min_size=1)


def test_maps_by_queue_are_written_as_java_writes_them() -> None:
    """SG-096, SG-088: objects as keys (202, 208, 222, 223, 317), bare integers as keys (308)."""
    assert encode_topic_stats({QUEUE: QueueSpan(0, 1, 1)}) == (
        b'{"offsetTable":{' + KEY + b':{"lastUpdateTimestamp":1,"maxOffset":1,"minOffset":0}}}'
    )
    stats = ConsumeStats(0.0, {QUEUE: QueueProgress(9, 4, 7, 6)})
    numbers = b'{"brokerOffset":9,"consumerOffset":4,"lastTimestamp":7,"pullOffset":6}'
    row = b'{"consumeTps":0.0,"offsetTable":{' + KEY + b":" + numbers + b"}}"
    assert encode_consume_stats(stats) == row
    assert encode_all_consume_stats("h:1", {"g": [stats]}) == (
        b'{"brokerAddr":"h:1","consumeStatsList":[{"g":[' + row + b']}],"totalDiff":5}'
    )
    assert encode_offsets({QUEUE: 12}) == b'{"offsetTable":{' + KEY + b":12}}"
    assert encode_consumer_status({"c@1": {QUEUE: 12}}) == (
        b'{"consumerTable":{"c@1":{' + KEY + b':12}},"messageQueueTable":{}}'
    )
    assert encode_corrections({0: 5}) == b'{"correctionOffsets":{0:5}}'
    assert encode_offset_list({QUEUE: 12}) == (
        b'{"offsetTable":[{"brokerName":"broker-a","offset":12,"queueId":3,"topic":"TopicA"}]}'
    )


@given(offsets)
def test_offsets_come_back(table: dict[MessageQueue, int]) -> None:
    """SG-067: the bodies of 220 and 222."""
    assert decode_offsets(encode_offsets(table)) == table


@given(st.dictionaries(lines, lines | st.booleans() | st.integers()))
def test_settings_come_back(settings: dict[str, object]) -> None:
    """SG-088: the bodies of 25 and 26."""
    expected = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}
    assert decode_settings(encode_settings(settings)) == expected


@given(st.binary() | st.text().map(str.encode) | st.dictionaries(st.text(), st.integers()).map(repr).map(str.encode))
def test_anything_else_is_refused(body: bytes) -> None:
    """SG-096: a body that is none is the sender's error, whatever it holds."""
    for decode in (decode_offsets, decode_settings):
        try:
            decode(body)
        except BadRequest as error:
            assert str(error)


def test_offsets_that_are_no_numbers_are_refused() -> None:
    """SG-067: as a broken client may answer."""
    for value in (b"null", b'"7"', b"true", b"1.5", b"{}"):
        try:
            decode_offsets(b'{"offsetTable":{' + KEY + b":" + value + b"}}")
        except BadRequest as error:
            assert "offsets" in str(error)
        else:
            raise AssertionError(value)
