"""Parks as a start reads them."""

import json
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import CorruptRecord
from metaq.message import LogOffset
from metaq.protocol.properties import CRON, TIMER
from metaq.protocol.record import encode_properties
from metaq.protocol.text.messages import Stored
from metaq.timers.inspecting import TimerInspection
from metaq.timers.records import MARKS, Again, Park, due_of_first, event_of_mark, event_of_park, key_of, properties_of_park
from tests.support.wire import stored_record


def park(body: bytes, pairs: dict[str, str], log_offset: int = 100) -> Park:
    """Return what a park with these properties means."""
    properties = encode_properties(pairs.items())
    data = stored_record("METAQ_SYS_TIMERS", body, zlib.crc32(body) & 0x7FFFFFFF, log_offset=log_offset, properties=properties)
    return event_of_park(Stored(memoryview(data), 0, len(data), LogOffset(log_offset)))


def test_a_first_park_and_one_that_stores_the_timer_again() -> None:
    added = properties_of_park(1_700_000_000_000, "orders", 3)
    first = park(b"x", {"k": "v", **added})
    assert (first.key, first.place, first.before) == (key_of(1_700_000_000_000, 100), 100, None)
    again = park(b"x", {"k": "v", **added, TIMER: str(Again(100, 250, 5))}, log_offset=900)
    assert (again.key, again.place, again.before) == (first.key, 900, 250)


def test_only_the_broker_s_own_properties_count() -> None:
    """Neither a body nor a name that ends like one of the broker's says anything of the timer."""
    added = properties_of_park(1_700_000_000_000, "orders", 3)
    body = f"{TIMER}\x01{Again(1, 2, 3)}\x02TIMER_OUT_MS\x01junk".encode()
    found = park(body, {f"my{TIMER}": "junk", **added})
    assert (found.key, found.before) == (key_of(1_700_000_000_000, 100), None)


@pytest.mark.parametrize(
    "pairs", [{TIMER: "1:2"}, {TIMER: "a:b:c"}, {CRON: "n"}, {"TIMER_OUT_MS": "soon"}, {"TIMER_OUT_MS": "-1"}]
)
def test_a_park_that_cannot_be_read_is_damage(pairs: dict[str, str]) -> None:
    """E-10: as for a mark, so that a start reads on after it."""
    with pytest.raises(CorruptRecord, match="log offset 100 cannot be read"):
        park(b"x", properties_of_park(1, "orders", 0) | pairs)


TEXTS = st.lists(
    st.sampled_from(
        ("TIMER_OUT_MS", "xTIMER_OUT_MS", TIMER, CRON, "METAQ_", "k", "5", "1:2:3", "n:7", "soon", "9" * 18, "9" * 19)
    )
    | st.sampled_from(("\x01", "\x02"))
).map("".join)


@given(TEXTS, st.sampled_from((b"", b"\x02", b"body TIMER_OUT_MS\x0177\x02")))
def test_the_quick_way_to_a_due_time_says_the_same_or_nothing(text: str, body: bytes) -> None:
    """E-10, N-10: whatever the properties are, and whatever stands before them."""
    data = stored_record("METAQ_SYS_TIMERS", body, 0, log_offset=100, properties=text.encode())
    due_ms = due_of_first(data)
    if due_ms is not None:
        assert event_of_park(Stored(memoryview(data), 0, len(data), LogOffset(100))) == Park(
            key_of(due_ms, 100), 100, None, 100 + len(data)
        )


def test_the_quick_way_reads_what_nearly_all_parks_are() -> None:
    for pairs in ({}, {"k": "v", "TIMER_OUT_MS": "3"}, {"TAGS": "t"}):
        properties = encode_properties((pairs | properties_of_park(1_700_000_000_000, "orders", 3)).items())
        data = stored_record("METAQ_SYS_TIMERS", b"x", 0, log_offset=100, properties=properties)
        assert due_of_first(data) == 1_700_000_000_000
    for properties in (b"xTIMER_OUT_MS\x0155\x02", b"k\x01v\x02", b"TIMER_OUT_MS\x01soon\x02"):
        assert due_of_first(stored_record("METAQ_SYS_TIMERS", b"x", 0, properties=properties)) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = (
    "to",
    "segments",
    "timers",
    "secret",
    "name",
    "cron",
    "zone",
    "topic",
    "partition",
    "missed",
    "body",
    "replaced",
    "ended",
)


@given(
    st.fixed_dictionaries({"do": st.sampled_from(["deliver", "cancel", "secret", "define", "undefine", "x"])}).flatmap(
        lambda mark: st.dictionaries(st.sampled_from(NAMES), VALUES).map(lambda more: {**more, **mark})
    )
    | VALUES
)
def test_any_mark_is_read_or_damage(mark: object) -> None:
    """E-10: whatever an intact mark says, a start and an inspection go on after it."""
    body = json.dumps(mark).encode()
    data = stored_record("METAQ_SYS_TIMERS", body, zlib.crc32(body) & 0x7FFFFFFF, log_offset=100)
    stored = Stored(memoryview(data), 0, len(data), LogOffset(100))
    with suppress(CorruptRecord):
        event_of_mark(stored)
    for log_offset, _ in TimerInspection().record(MARKS, stored):
        assert log_offset == 100
