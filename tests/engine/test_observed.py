"""The table of text readers and the remembered store times are bounded."""

from metaq.engine.offsets.offsetexport import MOST_TIMES, StoreTimes
from metaq.engine.tables.observed import FORGOTTEN_S, LONGEST_GROUP, MOST_PLACES, OWNS_S, Observed
from metaq.protocol.text.commands import Get
from metaq.store.files.filecache import go_on
from tests.support.manualclock import ManualClock

READER = ("10.0.0.7", 4711)


def get(group: str, partition: int = 0, position: int = 0) -> Get:
    return Get("orders", group, partition, position, 1024, "1", 0)


def test_the_oldest_reader_is_dropped() -> None:
    """MQ-063: when there are too many; with its next get it is there again."""
    observed = Observed(ManualClock().monotonic)
    for number in range(MOST_PLACES + 1):
        observed.asked(get(f"g{number}"), READER)
    assert len(observed.table(go_on)) == MOST_PLACES
    assert ("g0", "orders") not in observed.table(go_on) and ("g1", "orders") in observed.table(go_on)
    observed.asked(get("g0", position=9), READER)
    assert observed.table(go_on)["g0", "orders"][0].position == 9
    assert ("g1", "orders") not in observed.table(go_on) and len(observed.table(go_on)) == MOST_PLACES


def test_a_silent_reader_has_nothing_and_is_forgotten() -> None:
    """MQ-063: the partition is nobody's after a minute; a day later nobody knows of the reader."""
    clock = ManualClock()
    observed = Observed(clock.monotonic)
    observed.asked(get("reader", 0, 5), READER)
    clock.advance(OWNS_S / 2)
    observed.asked(get("reader", 1, 6), READER)
    clock.advance(OWNS_S / 2)
    places = observed.table(go_on)["reader", "orders"]
    assert {number: (each.position, observed.owner(each)) for number, each in places.items()} == {
        0: (5, None),
        1: (6, "10.0.0.7:4711"),
    }
    clock.advance(FORGOTTEN_S - OWNS_S / 2 - 1)
    assert list(observed.table(go_on)["reader", "orders"]) == [1]
    clock.advance(2)
    assert observed.table(go_on) == {}


def test_a_group_with_a_long_name_is_not_observed() -> None:
    """MQ-063: a line has room for 4,000 characters."""
    observed = Observed(ManualClock().monotonic)
    observed.asked(get("g" * (LONGEST_GROUP + 1)), READER)
    assert observed.table(go_on) == {}


def test_store_times_that_are_asked_for_are_kept() -> None:
    """SG-055: and no more than there is room for."""
    times = StoreTimes()
    times.put(("orders", 0, 0), 1000)
    for ordinal in range(1, 2 * MOST_TIMES):
        times.put(("orders", 0, ordinal), 1000 + ordinal)
        if ordinal % 1000 == 0:
            assert times.get(("orders", 0, 0)) == 1000
    assert times.get(("orders", 0, 1)) is None
    assert times.get(("orders", 0, 2 * MOST_TIMES - 1)) == 1000 + 2 * MOST_TIMES - 1
    assert sum(times.get(("orders", 0, ordinal)) is not None for ordinal in range(2 * MOST_TIMES)) <= MOST_TIMES
