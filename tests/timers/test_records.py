"""Parks as a start reads them."""

import zlib

from metaq.message import LogOffset
from metaq.protocol.properties import TIMER
from metaq.protocol.record import encode_properties
from metaq.protocol.text.messages import Stored
from metaq.timers.records import Again, Parked, event_of_park, key_of, properties_of_park
from tests.support.wire import stored_record


def park(body: bytes, pairs: dict[str, str], log_offset: int = 100) -> Parked:
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
