"""Messages of a store folder that have aged out, and units that only look as if theirs had."""

from pathlib import Path

import pytest

from metaq.errors import AgedOut
from metaq.message import TopicPartition
from metaq.spark.reading.disk import Ends, Folder
from metaq.store.recovery.recovery import open_store
from tests.spark.test_disk import FIRST, SMALL, bodies_of, make, put


def test_messages_that_aged_out(tmp_path: Path) -> None:
    """P48, SG-045, SG-049: the oldest message is told, and who reads from before it is told the range, at once or later."""
    made = make(tmp_path / "data", 900, 300)
    bodies = made.bodies[FIRST]
    folder = Folder(made.path)
    reading = folder.pieces(*FIRST, 0, len(bodies))
    begun = next(reading)
    assert len(begun.sizes) < 100
    segments = sorted((made.path / "commitlog").iterdir())
    for segment in segments[:6]:
        segment.unlink()
    least, most = folder.ends(*FIRST)
    assert 100 < least < most == len(bodies)
    with pytest.raises(
        AgedOut, match=f"^messages {len(begun.sizes)} to {least - 1} of a-0 have aged out; .* is {least}$"
    ) as found:
        list(reading)
    assert found.value.least == least
    with pytest.raises(AgedOut, match=f"^messages 3 to 19 of a-0 have aged out; the oldest that is kept is {least}$"):
        list(folder.pieces(*FIRST, 3, 20))
    assert made.read() == (bodies[least:], [])
    assert bodies_of(begun) == bodies[: len(begun.sizes)], "what is read stays readable"
    queue = made.path / "consumequeue" / "a" / "0"
    reading = folder.pieces(*FIRST, least, most)
    next(reading)
    for path in sorted(queue.iterdir())[:-1]:
        path.unlink()
    least = folder.ends(*FIRST).least
    assert least == int(next(queue.iterdir()).name) // 16 < most
    with pytest.raises(AgedOut, match=f" to {least - 1} of a-0 have aged out"):
        list(reading)


def test_a_partition_whose_messages_have_all_aged_out(tmp_path: Path) -> None:
    """P48: it is empty, and goes on where it was."""
    made = make(tmp_path / "data", 60, 100)
    store, _ = open_store(made.path, SMALL)
    for _ in range(600):
        put(store, TopicPartition("c", 0), bytes(100))
    store.close()
    for segment in sorted((made.path / "commitlog").iterdir())[:3]:
        segment.unlink()
    assert Folder(made.path).ends(*FIRST) == Ends(20, 20)
    assert made.read() == ([], [])


def test_a_damaged_last_unit_that_leads_before_the_log(tmp_path: Path) -> None:
    """F-BIT: its message has not aged out, as those before it have not; nor was it durable at a checkpoint."""
    made = make(tmp_path / "data", 900, 300)
    for path in [*sorted((made.path / "commitlog").iterdir())[:6], *made.path.glob("checkpoint*")]:
        path.unlink()
    least, most = Folder(made.path).ends(*FIRST)
    queue = max((made.path / "consumequeue" / "a" / "0").iterdir())
    units = bytearray(queue.read_bytes())
    units[-16:-8] = bytes(8)
    queue.write_bytes(units)
    folder = Folder(made.path)
    assert folder.ends(*FIRST) == Ends(least, most - 1)
    (*_, last) = folder.pieces(*FIRST, least, most)
    assert last.first + len(last.sizes) == most
    assert last.sizes[-1] == 0
