"""Planning: nothing is read twice, nothing is left out in silence, and all tasks get their share."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import ConfigError
from metaq.message import MessageQueue, TopicPartition
from metaq.spark.reading.options import EARLIEST, LATEST, Place
from metaq.spark.reading.ranges import (
    QUEUES,
    WORTH_A_TASK,
    Bounds,
    Position,
    Range,
    Span,
    beyond,
    decode_position,
    encode_position,
    extended,
    kept,
    limited,
    narrowed,
    refuse_crossed,
    refuse_late,
    resolve_offsets,
    shared,
    starts,
    task_count,
    told,
)

A, B = TopicPartition("a", 0), TopicPartition("a", 1)
counts = st.integers(0, 1000)
partitions = st.builds(TopicPartition, st.sampled_from(["a", "b"]), st.integers(0, 5))


def ordinals(ranges: list[Range]) -> list[tuple[TopicPartition, int]]:
    return [(one.partition, offset) for one in ranges for offset in range(one.begin, one.end)]


@st.composite
def some_ranges(draw: st.DrawFn) -> list[Range]:
    found = draw(st.dictionaries(partitions, st.tuples(counts, st.integers(0, 60)), max_size=8))
    return [Range(key, begin, begin + size) for key, (begin, size) in sorted(found.items())]


# -- triggers -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 100), st.integers(0, 20))
def test_a_micro_batch_waits_for_messages_but_not_for_long(arrivals: list[int], least: int, longest: int) -> None:
    """P47: each has ``least`` messages, or ``longest`` seconds have passed since the last one; no message waits longer."""
    waiting, last, oldest = 0, 0, None
    for now, count in enumerate(arrivals):
        waiting += count
        oldest = now if oldest is None and waiting else oldest
        if starts(waiting, now - last, least, longest):
            assert waiting >= least or (waiting and now - last >= longest)
            waiting, last, oldest = 0, now, None
        assert waiting < least
        assert oldest is None or now - oldest < longest


@given(st.integers(0, 1000), st.floats(0, 1e6), st.integers(1, 1000), st.floats(0, 1e6))
def test_a_micro_batch_starts_for_messages_only(waiting: int, idle_s: float, least: int, longest_s: float) -> None:
    """P47: never for none, always for enough, and once it starts, more messages or more time change nothing."""
    assert not starts(0, idle_s, least, longest_s)
    assert starts(least + waiting, idle_s, least, longest_s)
    assert starts(1, longest_s, least, longest_s), "the first message after a long pause starts one at once"
    if starts(waiting, idle_s, least, longest_s):
        assert starts(waiting + 1, idle_s, least, longest_s)
        assert starts(waiting, idle_s + 1, least, longest_s)


# -- sharing --------------------------------------------------------------------------------------------------------------


@given(some_ranges(), st.integers(1, 12))
def test_tasks_share_all_messages_equally_and_in_order(ranges: list[Range], count: int) -> None:
    """P47: as many tasks as asked for, equal but for one message, none empty, order kept."""
    tasks = shared(ranges, count)
    assert [place for task in tasks for place in ordinals(task)] == ordinals(ranges)
    sizes = [sum(one.size for one in task) for task in tasks]
    assert len(tasks) == min(count, len(ordinals(ranges)))
    assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)
    assert all(one.size for task in tasks for one in task)


@given(st.integers(0, 10**9), st.integers(1, 64), st.none() | st.integers(1, 500))
def test_tasks_are_few_unless_wished_otherwise(messages: int, parallelism: int, wished: int | None) -> None:
    """P47: no more than two for each that can run at a time, each worth its cost; minPartitions asks for more."""
    count = task_count(messages, parallelism, wished)
    assert 1 <= count <= max(1, messages)
    assert count <= max(2 * parallelism, wished or 0)
    if wished is None:
        assert count == 1 or count <= -(-messages // WORTH_A_TASK)
    else:
        assert count >= min(wished, max(1, messages))


@given(st.dictionaries(partitions, st.tuples(counts, st.integers(0, 300)), max_size=9), st.integers(1, 500))
def test_a_limit_is_kept_exactly_and_shared_in_proportion(backlog: dict[TopicPartition, tuple[int, int]], most: int) -> None:
    """P47: maxOffsetsPerTrigger: as much as may be, in proportion, and nobody is left out for whom there is room."""
    begins = {key: begin for key, (begin, _) in backlog.items()}
    ends = {key: begin + size for key, (begin, size) in backlog.items()}
    result = limited(begins, ends, {}, most)
    total = sum(size for _, size in backlog.values())
    assert result.keys() == ends.keys()
    assert sum(result[key] - begins[key] for key in ends) == min(most, total)
    waiting = {key: size for key, (_, size) in backlog.items() if size}
    for key, size in waiting.items():
        taken = result[key] - begins[key]
        assert 0 <= taken <= size
        if most >= len(waiting):
            assert taken >= 1
            assert most >= total or abs(taken - size * most / total) <= 1 + len(waiting)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.integers(1, 5))
def test_with_a_limit_everything_is_read_once(sizes: list[int], most: int) -> None:
    """P47: batch by batch, each as large as it may be."""
    begins = {TopicPartition("t", number): 0 for number in range(len(sizes))}
    ends = {TopicPartition("t", number): size for number, size in enumerate(sizes)}
    for _ in range(-(-sum(sizes) // most)):
        after = limited(begins, ends, {}, most)
        assert sum(after.values()) == min(sum(sizes), sum(begins.values()) + most)
        assert all(begins[key] <= after[key] <= ends[key] for key in ends)
        begins = after
    assert begins == ends


def test_with_fewer_messages_than_partitions_they_take_turns() -> None:
    """P47: two a time of five partitions: after three batches each was served."""
    begins = {TopicPartition("t", number): 0 for number in range(5)}
    ends = dict.fromkeys(begins, 1000)
    for _ in range(3):
        begins = limited(begins, ends, {}, 2)
    assert sorted(begins.values()) == [1, 1, 1, 1, 2]


def test_a_new_partition_counts_from_its_beginning() -> None:
    """P47: what a query has not heard of begins at its oldest message."""
    assert limited({A: 10}, {A: 10, B: 8}, {A: Span(0, 10), B: Span(4, 8)}, 3) == {A: 10, B: 7}


def test_a_limit_does_not_count_what_has_aged_out() -> None:
    """P47: neither in a partition that is read, nor for one that holds nothing more, whose losses are told at once."""
    assert limited({A: 10, B: 0}, {A: 60, B: 5}, {A: Span(50, 60), B: Span(5, 5)}, 4) == {A: 54, B: 5}
    assert limited({A: 10}, {A: 60}, {A: Span(50, 60)}, 10) == {A: 60}


# -- data loss ------------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(partitions, st.tuples(counts, counts), max_size=8),
    st.dictionaries(partitions, st.tuples(counts, counts).map(lambda pair: Span(min(pair), max(pair))), max_size=8),
)
def test_what_is_wanted_is_kept_or_told(
    wanted: dict[TopicPartition, tuple[int, int]], spans: dict[TopicPartition, Span]
) -> None:
    """P48: each message of a range is read or is in exactly one loss; nothing else is read."""
    ranges = [Range(key, *pair) for key, pair in sorted(wanted.items())]
    left, losses = kept(ranges, spans)
    lost = [Range(loss.partition, loss.begin, loss.end) for loss in losses if wanted[loss.partition][0] <= loss.begin]
    assert sorted(ordinals(left) + ordinals(lost)) == ordinals(ranges)
    for key, offset in ordinals(left):
        assert spans[key].least <= offset < spans[key].most
    for key, offset in ordinals(lost):
        assert key not in spans or not spans[key].least <= offset < spans[key].most


def test_losses_name_partition_offsets_and_reason() -> None:
    """P48."""
    ranges = [Range(A, 0, 100), Range(B, 50, 70)]
    _, losses = kept(ranges, {A: Span(30, 90), B: Span(0, 10)})
    assert [str(loss) for loss in losses] == [
        "a-0 offsets 0 to 29 (30): they have aged out; the oldest that is kept is 30",
        "a-0 offsets 90 to 99 (10): the partition ends at 90",
        "a-1 offsets 50 to 69 (20): the partition ends at 10",
    ]
    assert "a-9 offsets 0 to 4 (5): its topic, or its broker" in told(kept([Range(TopicPartition("a", 9), 0, 5)], {})[1])
    assert told([losses[0]] * 12).endswith("; and 2 ranges more")


def test_a_beginning_beyond_the_end_is_a_loss() -> None:
    """P48."""
    assert [str(loss) for loss in beyond({A: 100, B: 10}, {A: Span(0, 100), B: Span(0, 7)})] == [
        "a-1 offsets 7 to 9 (3): the partition ends at 7, before reading begins"
    ]


def test_offsets_that_went_back_are_never_read_again() -> None:
    """P48: a partition that is shorter than what was read of it gives nothing, and says so."""
    left, losses = kept([Range(A, 100, 40)], {A: Span(0, 40)})
    assert left == []
    assert [(loss.begin, loss.end) for loss in losses] == [(40, 100)]
    assert "went back" in str(losses[0])


# -- positions ------------------------------------------------------------------------------------------------------------


def queues(topic: str, *places: tuple[str, int]) -> tuple[MessageQueue, ...]:
    return tuple(MessageQueue(topic, broker, number) for broker, number in places)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.lists(st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 9)), unique=True, max_size=9),
    ),
    st.data(),
)
def test_positions_survive_json(layout: dict[str, list[tuple[str, int]]], data: st.DataObject) -> None:
    """P47: what a checkpoint holds is read back as it was, and equal positions are equal text."""
    rows = {topic: queues(topic, *places) for topic, places in layout.items()}
    keys = [TopicPartition(topic, number) for topic, row in rows.items() for number in range(len(row))]
    offsets = data.draw(st.fixed_dictionaries(dict.fromkeys(keys, counts)))
    begins = {key: offset for key, offset in offsets.items() if key.partition % 2}
    text = json.dumps(encode_position(Position(offsets, rows, begins)))
    found = decode_position(json.loads(text))
    assert found == Position(offsets, rows, begins)
    shuffled = dict(data.draw(st.permutations(list(offsets.items()))))
    assert json.dumps(encode_position(Position(shuffled, rows, begins))) == text


def test_a_checkpoint_is_short_and_reads_as_kafkas() -> None:
    """P47."""
    layout = {"orders": queues("orders", *(("x", n) for n in range(3)), ("y", 0), ("x", 3))}
    offsets = {TopicPartition("orders", number): number * 10 for number in range(5)}
    assert encode_position(Position(offsets, layout)) == {
        "orders": {"0": 0, "1": 10, "2": 20, "3": 30, "4": 40},
        QUEUES: {"orders": [["x", 0, 3], ["y", 0, 1], ["x", 3, 1]]},
    }


def test_new_queues_get_new_numbers() -> None:
    """P47: a broker that comes, even one that sorts before the others, moves no partition."""
    before = {"t": queues("t", ("m", 0), ("m", 1))}
    now = {"t": queues("t", ("a", 0), ("m", 0), ("m", 1), ("m", 2)), "u": queues("u", ("a", 0))}
    assert extended(before, now) == {
        "t": queues("t", ("m", 0), ("m", 1), ("a", 0), ("m", 2)),
        "u": queues("u", ("a", 0)),
    }
    assert extended(before, {}) == before


@pytest.mark.parametrize("found", [{}, {"t": {"0": 1}}, {"t": {"0": 1}, QUEUES: {"t": []}}, {"t": 5, QUEUES: {}}])
def test_the_checkpoint_of_another_source_is_refused(found: dict[str, object]) -> None:
    """P47."""
    with pytest.raises(ConfigError, match="the checkpoint's offsets"):
        decode_position(found)


# -- beginnings and ends --------------------------------------------------------------------------------------------------

SPANS = {A: Span(10, 50), B: Span(0, 0)}


def never(partition: TopicPartition, time_ms: int) -> int:
    raise AssertionError((partition, time_ms))


def test_places() -> None:
    """P47: earliest, latest, offsets with both, and times."""
    assert resolve_offsets(Place("o", EARLIEST), SPANS, never) == {A: 10, B: 0}
    assert resolve_offsets(Place("o", LATEST), SPANS, never) == {A: 50, B: 0}
    assert resolve_offsets(Place("o", None, {"a": {0: 33, 1: LATEST}}), SPANS, never) == {A: 33, B: 0}
    assert resolve_offsets(Place("o", 7, by_time=True), SPANS, lambda _, time_ms: time_ms) == {A: 7, B: 7}
    table = {"a": {0: 5, 1: 6}}
    assert resolve_offsets(Place("o", None, table, True), SPANS, lambda _, time_ms: time_ms) == {A: 5, B: 6}


def test_a_table_names_every_partition_and_no_other() -> None:
    """P47."""
    with pytest.raises(ConfigError, match="startingOffsets: a-1 is left out"):
        resolve_offsets(Place("startingOffsets", None, {"a": {0: 1}}), SPANS, never)
    with pytest.raises(ConfigError, match="startingOffsets: a-7 is not read; there are a-0, a-1"):
        resolve_offsets(Place("startingOffsets", None, {"a": {0: 1, 1: 1, 7: 1}}), SPANS, never)


def test_a_time_behind_the_newest_message() -> None:
    """P47."""
    place = Place("startingTimestamp", 7, by_time=True)
    refuse_late(place, {A: 49, B: -1}, SPANS)
    with pytest.raises(ConfigError, match="startingTimestamp: a-0 has no message stored then or later"):
        refuse_late(place, {A: 50, B: -1}, SPANS)


def test_an_end_before_the_beginning() -> None:
    """P47."""
    starting, ending = Place("startingOffsets", None, {"a": {0: 30}}), Place("endingOffsets", None, {"a": {0: 20}})
    with pytest.raises(ConfigError, match="startingOffsets, endingOffsets: a-0 begins at 30 and ends at 20"):
        refuse_crossed(starting, ending, {A: 30}, {A: 20})
    refuse_crossed(Place("startingTimestamp", 5, by_time=True), ending, {A: 30}, {A: 20})


# -- filters --------------------------------------------------------------------------------------------------------------

bounds = st.builds(Bounds, st.none() | st.frozensets(st.integers(0, 80), max_size=4), *[st.none() | st.integers(0, 80)] * 2)


@given(some_ranges(), bounds, bounds)
def test_filters_leave_out_only_what_cannot_match(ranges: list[Range], partition: Bounds, offset: Bounds) -> None:
    """P47: every row that matches stays; without a list of offsets nothing else does."""
    left = ordinals(narrowed(ranges, Bounds(frozenset({"a"})), partition, offset))
    every = [place for place in ordinals(ranges) if place[0].topic == "a" and partition.admit(place[0].partition)]
    matching = [place for place in every if offset.admit(place[1])]
    assert set(matching) <= set(left) <= set(every)
    if offset.among is None:
        assert left == matching


@given(bounds, bounds, st.integers(0, 80))
def test_two_filters_are_both_held(one: Bounds, other: Bounds, value: int) -> None:
    """P47."""
    assert one.both(other).admit(value) == (one.admit(value) and other.admit(value))
