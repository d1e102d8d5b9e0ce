"""The times that properties ask for: as they are sent, and taken apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import MessageIllegal
from metaq.protocol import properties
from metaq.protocol.delays import as_delayed, due_ms, due_of

NOW_MS = 1_000_000
OTHERS = ("TAGS", "UNIQ_KEY", "KEYS", "WAIT", "DELAY", "TRAN_MSG", "TIMER_OUT_MS", "REAL_TOPIC", "n")
NAMES = st.sampled_from([*properties.TIMERS, *OTHERS])
VALUES = st.sampled_from(["5", "1700000000000", "true", "0", "", "-1", "x", "k1 k2", "٣", "9" * 18, "9" * 19])
PIECES = st.lists(st.one_of(st.tuples(NAMES, VALUES).map("\x01".join), st.just("junk")), max_size=5)


@given(PIECES, st.sampled_from(["", "\x02"]))
def test_what_only_delays_is_kept_as_it_was_sent(pieces: list[str], end: str) -> None:
    """ES-001: the short way says the same as the pairs, and leaves to these whatever else the broker acts on."""
    text = "\x02".join(pieces) + end
    pairs, short = properties.parse(text), as_delayed(text)
    if short is None:
        return
    assert not pairs.keys() & {"DELAY", "TRAN_MSG", "TIMER_OUT_MS", "REAL_TOPIC"}
    assert due_ms(short.name, short.value, NOW_MS) == due_of(pairs, NOW_MS)
    pairs.pop("WAIT", None)
    assert properties.parse(short.others.decode()) | {short.name: short.value} == pairs
    assert (short.tag, short.unique_key) == (pairs.get("TAGS"), pairs.get("UNIQ_KEY", ""))


@pytest.mark.parametrize("name", properties.TIMERS[:3])
def test_each_property_has_a_short_way(name: str) -> None:
    found = as_delayed(f"TAGS\x01t\x02{name}\x0112\x02UNIQ_KEY\x01U\x02WAIT\x01true\x02")
    assert found is not None
    assert found == (b"TAGS\x01t\x02UNIQ_KEY\x01U\x02", name, "12", "t", "U")


@pytest.mark.parametrize(
    ("pairs", "due"),
    [
        ({}, None),
        ({"TIMER_DELAY_SEC": "2"}, NOW_MS + 2000),
        ({"TIMER_DELAY_MS": "2"}, NOW_MS + 2),
        ({"TIMER_DELIVER_MS": "7"}, 7),
        ({"__STARTDELIVERTIME": "7"}, 7),
        ({"TIMER_DELIVER_MS": "7", "TIMER_DELAY_MS": "1"}, NOW_MS + 1),
        ({"TIMER_DELIVER_MS": "7", "TIMER_OUT_MS": "7"}, None),
    ],
)
def test_the_first_property_says_the_time(pairs: dict[str, str], due: int | None) -> None:
    """ES-001: and a message that was delayed before is not delayed again."""
    assert due_of(pairs, NOW_MS) == due


@pytest.mark.parametrize("value", ["", "x", "-1", "٣", "9" * 19])
def test_a_time_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(MessageIllegal, match=r"TIMER_DELAY_SEC is .*, not a number of s"):
        due_of({"TIMER_DELAY_SEC": value}, NOW_MS)
    assert as_delayed(f"TIMER_DELAY_SEC\x01{value}\x02") is None
