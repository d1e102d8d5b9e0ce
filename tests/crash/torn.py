"""Files cut short, or zeroed, from every byte of their last three records on: the folder opens with every whole record.

Replay one case: ``python -m tests.crash.torn --seed N``.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from metaq.protocol.record import BLANK_SIZE
from metaq.store.index.indexfile import HEADER, ITEM_SIZE
from metaq.store.messagestore import INDEX, LOG, QUEUES
from metaq.store.queues.consumequeue import UNIT_SIZE
from metaq.store.recovery.verify import verify
from tests.crash.command import Result, expect, main, run_until
from tests.crash.damage import Folder, Place, lost_messages, make_folder, reopen
from tests.crash.driver import case
from tests.crash.model import KEYS
from tests.support.faultydisk import DATA, FaultyDisk


def run(seed: int, count: int) -> Result:
    """Cut at least ``count`` times; a folder once begun is cut everywhere."""
    return run_until(one_case, "cuts", seed, count, "torn files")


def one_case(seed: int, share: float = 1.0) -> dict[str, int]:
    """Make a folder and cut it at every byte of the last three records of each file, or at a share of them."""
    rng = random.Random(seed)
    counts = {"cuts": 0, "folders": 1}
    with case("tests.crash.torn", seed):
        folder = make_folder(rng, steps=rng.choice((3, 12, 25)))
        everywhere = list(cuts(folder))
        for path, at, last in rng.sample(everywhere, round(share * len(everywhere))) if share < 1 else everywhere:
            for reboot in (False, True):
                for zeroed in (False, True) if last else (False,):
                    try:
                        check_cut(folder, rng, path, at, reboot=reboot, zeroed=zeroed)
                    except Exception as error:
                        raise AssertionError(f"{path} from byte {at} on, {reboot=} {zeroed=}: {error!r}") from error
                    counts["cuts"] += 1
    return counts


def cuts(folder: Folder) -> Iterator[tuple[Path, int, bool]]:
    """Where to cut: file and offset, and whether nothing of its kind is behind it.

    A file that is not the last of its queue may end too early, which is seen; zeros in the middle of a queue are for
    ``repair``.
    """
    last = folder.places[-3:]
    files = list(folder.disk.files())
    newest = {path.parent: path for path, _ in files}
    for path, data in files:
        if path.parent == DATA / LOG:
            base = int(path.name)
            low = max(last[0].sent.log_offset - base, 0)
            high = min(last[-1].end - base, len(data))
        elif QUEUES in path.parts:
            low, high = max(0, len(data) - 3 * UNIT_SIZE), len(data)
        elif path.parent == DATA / INDEX:
            items = len(data) - folder.settings.index_entries * ITEM_SIZE
            count = HEADER.unpack_from(data)[5]
            low, high = items + max(0, count - 3) * ITEM_SIZE, items + count * ITEM_SIZE
        elif path.name in ("lock", "abort"):
            continue
        else:
            low, high = 0, len(data)
        for at in range(low, high):
            yield path, at, QUEUES not in path.parts or newest[path.parent] == path


def check_cut(folder: Folder, rng: random.Random, path: Path, at: int, *, reboot: bool, zeroed: bool) -> None:
    """Damage a copy, open it, compare, write to it."""
    disk = folder.disk.copy(rng, reboot=reboot)
    data = bytes(disk.content(path))
    in_log = path.parent == DATA / LOG
    disk.set_content(path, data[:at].ljust(len(data) if zeroed else 0, b"\0"))
    store = reopen(folder, disk)
    torn = _torn(folder, int(path.name), at, len(data)) if in_log else []
    lost = lost_messages(folder, store)
    gone = {other for place in torn for other in folder.falls_with(place, reboot=reboot)}
    if in_log:
        gone |= _without_blank(folder, int(path.name), at, len(data), reboot=reboot)
    expect(set(lost) == gone, "every whole record is kept, and only those, of groups all or none", lost, gone)
    if folder.stopped or not reboot:
        for place in folder.places:
            queue = store.queue(*place.key)
            expect(queue.next > place.ordinal, "ordinals never go back", queue, place)
    for key in KEYS:
        queue = store.queue(*key)
        expect(store.locate(queue, 1 << 60, lambda file, size, offset: file.read(size, offset))[0] == queue.next, "end")
    store.close()
    if not in_log:
        _expect_rebuilt(disk)


def _torn(folder: Folder, base: int, at: int, size: int) -> list[Place]:
    """Return the places whose records a cut segment no longer holds whole; records of later segments are whole."""
    return [place for place in folder.places if place.end > base + at and place.sent.log_offset < base + size]


def _without_blank(folder: Folder, base: int, at: int, size: int, *, reboot: bool) -> set[Place]:
    """The groups that go on in the next segment when the blank record is cut, which stands among their members."""
    inside = [place for place in folder.places if base <= place.sent.log_offset < base + size]
    if not inside or base + at >= inside[-1].end + BLANK_SIZE:
        return set()
    groups = [folder.falls_with(place, reboot=reboot) for place in inside]
    return {place for group in groups if group[-1].sent.log_offset >= base + size for place in group}


def _expect_rebuilt(disk: FaultyDisk) -> None:
    """Check that all derived files, checkpoints and queues, are whole again."""
    damages = [
        damage
        for damage in verify(DATA, disk).damages
        if damage.path.name.startswith("checkpoint") or QUEUES in damage.path.parts
    ]
    expect(not damages, "what is derived was rebuilt", damages)


if __name__ == "__main__":
    main(one_case)
