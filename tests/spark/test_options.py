"""Options of reads: their meaning, and one clear error for each way in which they can be wrong."""

import pytest

from metaq.errors import BadRequest, ConfigError
from metaq.spark.reading.groups import GroupOffsets
from metaq.spark.reading.options import EARLIEST, LATEST, Place, ReadOptions, Topics, read_options

ORDERS = {"metaq.bootstrap.servers": "127.0.0.1:9876", "subscribe": "orders"}


def read(**options: str) -> ReadOptions:
    return read_options({**ORDERS, **options})


def test_defaults_are_those_of_the_kafka_source() -> None:
    """P47: a batch from earliest to latest, a stream from latest, data loss an error, no headers."""
    batch, stream = read().for_batch(), read().for_stream()
    assert batch.starting == Place("startingOffsets", EARLIEST)
    assert batch.ending == Place("endingOffsets", LATEST)
    assert stream.starting == Place("startingOffsets", LATEST)
    assert (batch.fail_on_data_loss, batch.headers, batch.min_partitions, stream.max_offsets) == (True, False, None, None)


def test_names_in_any_case() -> None:
    """P47: Spark hands them over in lower case."""
    options = read_options({name.lower(): value for name, value in {**ORDERS, "maxOffsetsPerTrigger": "7"}.items()})
    assert options.max_offsets == 7
    assert options.topics == Topics(names=("orders",))


def test_what_is_read() -> None:
    """P47: topics by name, by pattern, or single partitions."""
    servers = {"metaq.bootstrap.servers": "h"}
    assert read_options({**servers, "subscribe": " b, a,b,"}).topics == Topics(names=("a", "b"))
    assert read_options({**servers, "subscribePattern": "a.*"}).topics == Topics(pattern="a.*")
    assert read_options({**servers, "assign": '{"a": [2, 0, 2]}'}).topics == Topics(assigned={"a": (0, 2)})


def test_a_time_comes_before_times_and_these_before_offsets() -> None:
    """P47: the precedence of the Kafka source."""
    offsets, times = '{"orders": {"0": 5, "1": -2}}', '{"orders": {"0": 1700000000000}}'
    given = {"startingOffsets": offsets, "startingOffsetsByTimestamp": times, "startingTimestamp": "17"}
    assert read(**given).starting == Place("startingTimestamp", 17, by_time=True)
    del given["startingTimestamp"]
    assert read(**given).starting == Place("startingOffsetsByTimestamp", None, {"orders": {0: 1_700_000_000_000}}, True)
    del given["startingOffsetsByTimestamp"]
    assert read(**given).starting == Place("startingOffsets", None, {"orders": {0: 5, 1: EARLIEST}})


@pytest.mark.parametrize(
    ("place", "stands"),
    [
        (Place("o", EARLIEST), True),
        (Place("o", LATEST), False),
        (Place("o", None, {"t": {0: 5}}), True),
        (Place("o", None, {"t": {0: 5, 1: LATEST}}), False),
        (Place("o", 17, by_time=True), False),
    ],
)
def test_which_places_move_by_themselves(place: Place, stands: bool) -> None:
    """P47: those must be kept before anything is read from them."""
    assert place.stands is stands


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxOffsetPerTrigger": "5"}, ["maxoffsetpertrigger", "did you mean maxOffsetsPerTrigger"]),
        ({"kafka.bootstrap.servers": "h"}, ["did you mean metaq.bootstrap.servers"]),
        ({"zzz": "5"}, ["the option zzz is unknown; there are metaq.bootstrap.servers, metaq.user"]),
        ({"metaq.bootstrap.servers": ""}, ["metaq.bootstrap.servers", "path", "neither is there"]),
        ({"path": "store"}, ["both are there"]),
        ({"subscribe": ""}, ["exactly one of subscribe, subscribePattern, assign", "none is given"]),
        ({"assign": '{"a": [0]}'}, ["exactly one of", "subscribe and assign is given"]),
        ({"subscribe": "", "subscribePattern": "("}, ["subscribePattern: '(' is not a regular expression"]),
        ({"subscribe": "", "assign": '{"a": 0}'}, ["assign: topic a has 0", '{"orders": [0, 1]}']),
        ({"subscribe": "", "assign": '{"a": [-1]}'}, ["assign: topic a has [-1]"]),
        ({"startingOffsets": "soon"}, ["startingOffsets: 'soon' is neither earliest nor latest nor JSON"]),
        ({"startingOffsets": '{"orders": {"0": 5}'}, ["startingOffsets", "is not JSON", "delimiter"]),
        ({"startingOffsets": "{}"}, ["startingOffsets: '{}' is not a JSON object"]),
        ({"startingOffsets": '{"orders": [5]}'}, ["startingOffsets: topic orders has [5]"]),
        ({"startingOffsets": '{"orders": {"x": 5}}'}, ["a partition 'x'"]),
        ({"startingOffsets": '{"orders": {"0": -3}}'}, ["-3 of topic orders, partition 0, is not a number from -2 on"]),
        ({"startingOffsets": '{"orders": {"0": "5"}}'}, ["'5' of topic orders"]),
        ({"startingOffsetsByTimestamp": '{"orders": {"0": -1}}'}, ["-1 of topic orders", "from 0 on"]),
        ({"startingTimestamp": "yesterday"}, ["startingTimestamp: 'yesterday' is not a whole number from 0 on"]),
        ({"startingOffsetsByTimestampStrategy": "late"}, ["'late' is neither error nor latest"]),
        ({"maxOffsetsPerTrigger": "0"}, ["maxOffsetsPerTrigger: '0' is not a whole number from 1 on"]),
        ({"minPartitions": "2.5"}, ["minPartitions: '2.5' is not a whole number"]),
        ({"failOnDataLoss": "maybe"}, ["failOnDataLoss: 'maybe' is neither true nor false"]),
        ({"groupId": "my counting"}, ["groupId: group 'my counting': write 1 to 120 letters"]),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], words: list[str]) -> None:
    """P47: the name, the value, and what to write."""
    given = {name: value for name, value in {**ORDERS, **options}.items() if value}
    with pytest.raises(ConfigError) as caught:
        read_options(given)
    for word in words:
        assert word in str(caught.value)


def test_a_listener_refuses_a_group_that_none_can_be() -> None:
    """P47: at once, not at each batch."""
    with pytest.raises(BadRequest, match="group 'my counting': write 1 to 120 letters"):
        GroupOffsets(ORDERS["metaq.bootstrap.servers"], "my counting")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"startingOffsets": "latest"}, "startingOffsets: a batch cannot begin at latest"),
        ({"startingOffsets": '{"orders": {"0": -1}}'}, "startingOffsets: a batch cannot begin at latest"),
        ({"endingOffsets": "earliest"}, "endingOffsets: a batch cannot end at earliest"),
        ({"groupId": "g"}, "groupId: only streaming queries"),
    ],
)
def test_what_a_batch_cannot_do(options: dict[str, str], word: str) -> None:
    """P47."""
    with pytest.raises(ConfigError, match=word):
        read(**options).for_batch()


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "filterPushdown"])
def test_what_a_stream_cannot_do(name: str) -> None:
    """P47."""
    values = {"endingOffsets": "latest", "endingTimestamp": "5", "filterPushdown": "true"}
    with pytest.raises(ConfigError, match=name):
        read(**{name: values[name]}).for_stream()


def test_a_stream_needs_brokers() -> None:
    """P47: a store folder is a batch."""
    with pytest.raises(ConfigError, match="path: a store folder can only be read as a batch"):
        read_options({"path": "store", "subscribe": "orders"}).for_stream()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("", 900.0),
        ("15m", 900.0),
        ("15min", 900.0),
        ("30s", 30.0),
        ("250 MS", 0.25),
        ("250", 0.25),
        ("1h", 3600.0),
        ("0s", 0.0),
    ],
)
def test_a_delay_is_written_as_in_spark(given: str, seconds: float) -> None:
    """P47: 15 minutes if it is not given, milliseconds without a unit."""
    assert read(minOffsetsPerTrigger="5", maxTriggerDelay=given).max_delay_s == seconds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"minOffsetsPerTrigger": "0"}, "minOffsetsPerTrigger: '0' is not a whole number from 1 on"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "minOffsetsPerTrigger: 9 is over maxOffsetsPerTrigger, 8"),
        ({"minOffsetsPerTrigger": "9", "maxTriggerDelay": "soon"}, "maxTriggerDelay: 'soon' is not a time like 500ms, 30s"),
        ({"minOffsetsPerTrigger": "9", "maxTriggerDelay": "-1s"}, "maxTriggerDelay: '-1s' is not a time"),
        ({"minOffsetsPerTrigger": "9", "maxTriggerDelay": "5 weeks"}, "maxTriggerDelay: '5 weeks' is not a time"),
        ({"maxTriggerDelay": "5m"}, "maxTriggerDelay: it limits the wait for minOffsetsPerTrigger messages"),
    ],
)
def test_wrong_limits_of_a_micro_batch_are_named(options: dict[str, str], words: str) -> None:
    """P47: the least and the most must fit together, and a delay needs something to wait for."""
    with pytest.raises(ConfigError, match=words):
        read(**options)
