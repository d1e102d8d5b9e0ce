"""One flipped bit: ``verify`` reports it, it is never delivered, and costs at most the message it touched, or its group.

The class of the file is drawn evenly, then a byte in it that carries data, then a bit. The folder is opened as the same boot
of the machine finds it (the live mark counts) and as the next one does. Flips in unused space change nothing at all.

Replay one case: ``python -m tests.crash.flips --seed N``.
"""

import random
from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

from metaq.protocol.record import BLANK, BLANK_MAGIC, BLANK_SIZE
from metaq.store.checkpoint import read_checkpoint
from metaq.store.files.documents import BACKUP
from metaq.store.files.filecache import read_here
from metaq.store.index.indexfile import HEADER, HEADER_SIZE, ITEM, ITEM_SIZE, SLOT_SIZE
from metaq.store.messagestore import INDEX, LOG, QUEUES, MessageStore
from metaq.store.queues.consumequeue import UNIT_SIZE
from metaq.store.recovery.verify import verify
from tests.crash.command import Result, expect, main, run_until
from tests.crash.damage import Folder, Place, lost_messages, make_folder, reopen
from tests.crash.driver import case
from tests.support.faultydisk import DATA

FLIPS_A_FOLDER: Final = 40
UNUSED: Final = "unused"


class Extent(NamedTuple):
    """Bytes of one file that stand or fall together."""

    path: Path
    start: int
    end: int
    touched: Place | None
    """The message that a flip here may cost, perhaps with its group."""


def run(seed: int, count: int) -> Result:
    """Flip at least ``count`` bits that carry data."""
    return run_until(one_case, "flips", seed, count, "bit flips")


def one_case(seed: int) -> dict[str, int]:
    """Make a folder and flip bits in copies of it."""
    rng = random.Random(seed)
    counts = {"flips": 0, "flips in unused space": 0, "messages lost": 0}
    with case("tests.crash.flips", seed):
        folder = make_folder(rng, steps=rng.choice((8, 15, 25)))
        expect(not verify(DATA, folder.disk).damages, "the folder is whole", *verify(DATA, folder.disk).damages)
        extents = classes(folder)
        for _ in range(FLIPS_A_FOLDER):
            kind = rng.choice(sorted(extents))
            extent = rng.choice(extents[kind])
            at, bit = rng.randrange(extent.start, extent.end), rng.randrange(8)
            try:
                lost = check_flip(folder, rng, extent, at, bit, unused=kind == UNUSED)
            except Exception as error:
                raise AssertionError(f"{kind}: bit {bit} of byte {at} of {extent}: {error!r}") from error
            counts["flips in unused space" if kind == UNUSED else "flips"] += 1
            counts["messages lost"] += lost
    return counts


def classes(folder: Folder) -> dict[str, list[Extent]]:
    """The extents of each class of file."""
    found: defaultdict[str, list[Extent]] = defaultdict(list)
    bases = sorted(int(path.name) for path, _ in folder.disk.files() if path.parent == DATA / LOG)
    for path, data in folder.disk.files():
        if path.parent == DATA / LOG:
            _classify_segment(folder, path, data, found, last=int(path.name) == bases[-1])
        elif QUEUES in path.parts:
            base = int(path.name) // UNIT_SIZE
            for place in folder.places:
                at = (place.ordinal - base) * UNIT_SIZE
                if path.parent == DATA / QUEUES / place.key.topic / str(place.key.partition) and 0 <= at < len(data):
                    found["queue"].append(Extent(path, at, at + UNIT_SIZE, place))
        elif path.parent == DATA / INDEX:
            if extents := _index_extents(folder, path, data):
                found["index"] += extents
        elif data:
            kind = "backup" if path.name.endswith(BACKUP) else path.name
            if kind != "quarantine.json":
                found[kind].append(Extent(path, 0, len(data), None))
    return found


def _classify_segment(folder: Folder, path: Path, data: bytearray, found: dict[str, list[Extent]], *, last: bool) -> None:
    base = int(path.name)
    end = 0
    before: Place | None = None
    for place in folder.places:
        at = place.sent.log_offset - base
        if 0 <= at < len(data):
            found["log"].append(Extent(path, at, at + place.size, place))
            end, before = at + place.size, place
    rest = len(data) - end
    if rest >= BLANK_SIZE and BLANK.unpack_from(data, end) == (rest, BLANK_MAGIC):
        if not last:
            group = None if before is None else before.group
            behind = [place.group for place in folder.places if place.sent.log_offset >= base + len(data)]
            across = group is not None and group in behind  # it might be a member that is lost
            found["log"].append(Extent(path, end, end + BLANK_SIZE, before if across else None))
        end += BLANK_SIZE
    if end < len(data):
        found[UNUSED].append(Extent(path, end, len(data), None))


def _index_extents(folder: Folder, path: Path, data: bytearray) -> list[Extent]:
    """Header, slots, and the items of records that are there; none of what the checkpoint does not count."""
    checkpoint, _ = read_checkpoint(folder.disk, DATA)
    count = HEADER.unpack_from(data)[5]
    assert checkpoint is not None
    mark = checkpoint.key_index
    items = HEADER_SIZE + mark.slots * SLOT_SIZE
    uncounted = any(data[items + count * ITEM_SIZE :][:ITEM_SIZE])  # taken back at the next start, with slots that lead there
    if path.name > mark.file or (path.name == mark.file and (count != mark.items or uncounted)):
        return []
    places = [items + number * ITEM_SIZE for number in range(1, count)]
    there = [at for at in places if ITEM.unpack_from(data, at)[1] >= folder.begin]
    extents = [Extent(path, at, at + ITEM_SIZE, None) for at in there]
    extents += [Extent(path, at, at + SLOT_SIZE, None) for at in range(HEADER_SIZE, items, SLOT_SIZE)]
    return extents if there != places else [Extent(path, 0, HEADER_SIZE, None), *extents]


def check_flip(folder: Folder, rng: random.Random, extent: Extent, at: int, bit: int, *, unused: bool) -> int:
    """Flip one bit in copies of the folder; return how many messages that cost at most."""
    cost = 0
    for reboot in (False, True):
        disk = folder.disk.copy(rng, reboot=reboot)
        disk.content(extent.path)[at] ^= 1 << bit
        if not reboot:
            named = [(damage.path, damage.offset) for damage in verify(DATA, disk).damages]
            expect(unused == (not named), "verify finds what is damaged, and nothing else", named)
            expect(unused or (extent.path, extent.start) in named, "verify names file and place", named)
        store = reopen(folder, disk)
        lost = lost_messages(folder, store)
        in_log = extent.touched is not None and extent.path.parent == DATA / LOG
        at_risk = folder.falls_with(extent.touched, reboot=reboot) if in_log and extent.touched else [extent.touched]
        expect(set(lost) <= set(at_risk), "at most the touched message is lost, or its group", lost)
        expect(len(lost) in (0, len(at_risk)), "all of a group or nothing", lost, at_risk)
        for place in folder.places:
            queue = store.queue(*place.key)
            if place not in at_risk:
                expect(queue.next > place.ordinal, "ordinals never go back", queue, place)
        for place in rng.sample(folder.places, min(3, len(folder.places))):
            if place not in lost:
                answer = store.locate(store.queue(*place.key), place.sent.position, read_here)
                expect(answer == (place.ordinal, place.sent.position), "positions lead to their messages", answer, place)
                _check_found(store, place, damaged=extent.path.parent == DATA / INDEX)
        cost = max(cost, len(lost))
    return cost


def _check_found(store: MessageStore, place: Place, *, damaged: bool) -> None:
    """The message is found by its keys, unless the flip is in the index; then a query at least ends."""
    for word in place.sent.keys:
        found = store.query(place.key.topic, word, 0, 1 << 62, 64, read_here)
        there = place.sent.log_offset in [stored.log_offset for stored in found]
        expect(there or damaged or len(found) == 64, "found by key", place, word)


if __name__ == "__main__":
    main(one_case)
