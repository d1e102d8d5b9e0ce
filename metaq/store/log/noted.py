"""Reading records at places that the broker has noted itself, many at once: in the map, in the page cache or on the disk.

::

    places     a        b     c                    d
    log     ───┤record├─┤rec├─┤record├──────────────┤record├───
    windows    ╰─────────────────────TAIL╯          ╰───────TAIL╯

A place says where a record begins and not where it ends. So a window ends some bytes after its last place; a record that is
longer is read by itself.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from metaq.errors import ReadFailed
from metaq.message import TopicPartition
from metaq.protocol.record import BLANK, MAGIC, identity, is_intact
from metaq.protocol.text.messages import Stored
from metaq.store.files.disk import File
from metaq.store.files.filecache import Run, read_around, read_here, through_cache
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.segments import SMALLEST_RECORD, Segment

GAP_WORTH_READING: Final = 16 * 1024
"""Bytes between two places. Up to that many, one read over all is cheaper than two reads."""
TAIL: Final = 4096
MOST_BYTES: Final = 1 << 20
"""A window ends with the first place after so many bytes."""
_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""


class _Window(NamedTuple):
    """A part of a segment that is read in one go."""

    file: File
    base: int
    """Its log offset."""
    at: int
    size: int
    places: list[int]


def records_at(log: CommitLog, key: TopicPartition, places: Sequence[int], run: Run) -> dict[int, Stored]:
    """Return the intact records of a partition at the given log offsets; what is damaged or lost is missing.

    The offsets must be places at which records of the partition were put. A sector that cannot be read counts as damaged.
    Raises the ``StoreError`` of a disk that fails otherwise.
    """
    hot = log.hot_from()
    found: dict[int, Stored] = {}
    cold: list[int] = []
    segment: Segment | None = None
    view = memoryview(b"")
    base = end = 0
    for place in places:
        if place < hot:
            cold.append(place)
            continue
        if not base <= place < end:
            segment = log.find(place)
            if segment is None:
                continue
            base, end, view = segment.base, segment.end, log.view(segment)
        found[place] = _new(Stored, (view, place - base, BLANK.unpack_from(view, place - base)[0], place))
    if cold:
        _read_cold(log, key, sorted(cold), run, found)
    return found


def _read_cold(log: CommitLog, key: TopicPartition, places: list[int], run: Run, found: dict[int, Stored]) -> None:
    windows = _windows(log, places)
    read = through_cache(run)
    for window, data in zip(windows, _data(windows, run), strict=True):
        view = memoryview(data)
        for place in window.places:
            at = place - window.base
            size, magic = BLANK.unpack_from(view, at) if at + SMALLEST_RECORD <= len(view) else (0, 0)
            if magic == MAGIC and at + size > len(view):
                stored = log.record_at(place, read)
            else:
                stored = Stored(view, at, size, place) if is_intact(view[at : at + size], place) else None
            if stored is not None and identity(stored.buffer[stored.at : stored.at + stored.size])[:2] == key:
                found[place] = stored


def _data(windows: list[_Window], run: Run) -> list[bytes]:
    """Return the bytes of windows: those that are in the page cache at once, the others in one wait for the disk.

    In a thread of the pool each read gives up the interpreter's lock, and waits for it again beside a busy loop.
    """
    found = [_cached(each) for each in windows]
    cold = [at for at, data in enumerate(found) if data is None]
    if cold:
        read = run(lambda: [read_around(read_here, windows[at].file, windows[at].size, windows[at].at) for at in cold])
        for at, data in zip(cold, read, strict=True):
            found[at] = data
    return [data for data in found if data is not None]


def _cached(window: _Window) -> bytes | None:
    """Return the bytes of a window that is in the page cache; ``None`` for one that is not, or cannot be read as a whole."""
    try:
        return window.file.read_cached(window.size, window.at)
    except ReadFailed:
        return None


def _windows(log: CommitLog, places: list[int]) -> list[_Window]:
    """Return what has to be read for places, which are sorted; those that have aged out are left out."""
    windows: list[_Window] = []
    segment: Segment | None = None
    members: list[int] = []
    for place in places:
        is_near = members and place - members[-1] <= GAP_WORTH_READING and place - members[0] <= MOST_BYTES
        if segment is not None and place < segment.end and is_near:
            members.append(place)
            continue
        if segment is not None and members:
            windows.append(_window(log, segment, members))
        segment = log.find(place)
        members = [] if segment is None else [place]
    if segment is not None and members:
        windows.append(_window(log, segment, members))
    return windows


def _window(log: CommitLog, segment: Segment, places: list[int]) -> _Window:
    end = min(segment.end, places[-1] + TAIL)
    return _Window(log.file(segment), places[0], places[0] - segment.base, end - places[0], places)
