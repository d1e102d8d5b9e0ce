"""The end of the last process, what the log may lack because of it, and how long the log stays suspect."""

import random
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Final

import pytest

from metaq.message import Durability
from metaq.store.files.disk import Disk
from metaq.store.files.ending import ABORT, SUSPECT, Ending
from metaq.store.messagestore import LOG, MessageStore
from metaq.store.recordgroups import put_record_group
from metaq.store.recovery.recovery import Recovery, open_store
from metaq.store.recovery.verify import repair, verify
from metaq.store.settings import StoreSettings
from tests.store.test_record_groups import FIRST, MARKS, SETTINGS, bodies, put, ready
from tests.support.faultydisk import DATA, FaultyDisk, Stopped

REPLICA: Final = replace(SETTINGS, durability=Durability.REPLICA, replicated=True)
ON_DISK: Final = replace(SETTINGS, durability=Durability.DISK_REPLICA, replicated=True)
DISK: Final = replace(SETTINGS, durability=Durability.DISK)


def opened(disk: Disk, settings: StoreSettings) -> tuple[MessageStore, Recovery]:
    return open_store(DATA, settings, disk=disk)


def written(settings: StoreSettings, number: int = 40) -> FaultyDisk:
    """A folder with a checkpoint amid its messages, whose process is killed."""
    disk = FaultyDisk(random.Random(0))
    store, _ = opened(disk, settings)
    for at in range(number):
        put(store, FIRST, b"%04d" % at * 10)
        if at == 9:
            store.sweep()
            store.checkpoint()
    store.sweep()
    disk.killed()
    return disk


@pytest.mark.parametrize(
    ("settings", "reboot", "ending", "suspect"),
    [
        (REPLICA, False, Ending.KILLED, False),
        (REPLICA, True, Ending.POWER_CUT, True),
        (ON_DISK, False, Ending.KILLED, False),
        (ON_DISK, True, Ending.POWER_CUT, False),
    ],
)
def test_what_is_suspect(settings: StoreSettings, ending: Ending, *, reboot: bool, suspect: bool) -> None:
    """A log that a power cut may have shortened, where it counted as held before it was synced."""
    disk = written(settings).copy(random.Random(0), reboot=reboot)
    for _ in range(2):  # the second one follows a process that was killed
        store, recovery = opened(disk, settings)
        assert (recovery.ending, store.suspicion.reason is not None) == (ending, suspect)
        disk.killed()
        ending = Ending.KILLED
    store.close()
    store, recovery = opened(disk, settings)
    assert (recovery.ending, store.suspicion.reason is not None) == (Ending.ORDERLY, suspect)
    store.suspicion.clear()
    store.close()
    assert opened(disk, settings)[0].suspicion.reason is None


@pytest.mark.parametrize("content", [b"", b"x", b'{"crc32c":"00000000","boot_id":"","synced":true}'])
def test_a_mark_that_cannot_be_read_is_a_power_cut(content: bytes) -> None:
    """So is what stood there before it said whose it is."""
    disk = written(REPLICA)
    disk.set_content(DATA / ABORT, content)
    store, recovery = opened(disk, REPLICA)
    assert recovery.ending is Ending.POWER_CUT
    assert store.suspicion.reason is not None
    disk.killed()
    disk.content(DATA / SUSPECT)[25] ^= 1
    assert "checksum" in str(opened(disk, REPLICA)[0].suspicion.reason)


def test_a_level_that_syncs_does_not_hide_what_was_written_before() -> None:
    """Data that a killed process left in the page cache goes with the power, even if the next process syncs while it opens."""
    disk = written(REPLICA)
    opened(disk, ON_DISK)
    disk.killed()
    assert opened(disk.copy(random.Random(0), reboot=True), ON_DISK)[0].suspicion.reason is not None


def test_no_process_that_ends_in_between_hides_it() -> None:
    """Killed, or once more without power, at each call that changes something while the folder is opened."""
    image = punched(written(REPLICA).copy(random.Random(0), reboot=True))
    disk = image.copy(random.Random(0))
    opened(disk, REPLICA)
    for call in range(1, disk.calls + 1):
        for seed in range(3):
            disk = image.copy(random.Random(seed))
            disk.stop_at = call
            with pytest.raises(Stopped):
                opened(disk, REPLICA)
            if seed:
                disk = disk.power_cut(random.Random(seed))
            disk.killed()
            store, _ = opened(disk, REPLICA)
            assert store.suspicion.reason is not None, (call, seed)
            assert bodies(store, FIRST)[:20] == [b"%04d" % at * 10 for at in range(20)], (call, seed)


def punched(disk: FaultyDisk, body: bytes = b"0020" * 10) -> FaultyDisk:
    """Overwrite part of the log after the checkpoint with zeros, as if the page cache had not been written there."""
    for path, data in disk.files():
        if path.parent == DATA / LOG and (at := data.find(body)) >= 0:
            data[at : at + len(body)] = bytes(len(body))
    return disk


@pytest.mark.parametrize("settings", [REPLICA, ON_DISK, DISK])
@pytest.mark.parametrize("reboot", [False, True])
def test_a_replica_ends_at_a_hole(settings: StoreSettings, *, reboot: bool) -> None:
    """And copies again what it lacks. Who stands alone keeps what is behind it."""
    disk = punched(written(settings).copy(random.Random(0), reboot=reboot))
    disk.content(DATA / "checkpoint.live")[:8] = bytes(8)
    store, recovery = opened(disk, settings)
    assert store.suspicion.reason is not None
    found, kept = bodies(store, FIRST), 20 if settings.replicated else 40
    assert [body for body in found if body is not None] == [b"%04d" % at * 10 for at in range(kept) if at != 20]
    assert (recovery.cut is not None) == settings.replicated
    assert bool(recovery.gaps) != settings.replicated
    store.close()
    assert opened(disk, settings)[0].suspicion.reason is not None


def test_queues_end_at_the_hole_too() -> None:
    """Also when their files go further than the live mark, and after a kill at any call: other messages may come there."""
    disk = FaultyDisk(random.Random(0))
    store, _ = opened(disk, REPLICA)
    text_ends = []
    for at in range(40):
        put(store, FIRST, b"%04d" % at * 10)
        text_ends.append(store.queue(*FIRST).text_end)
        if at == 15:
            store.sweep()
    store.queue(*FIRST).write()
    disk.killed()
    image = punched(disk)
    for stop in count(1):
        disk = image.copy(random.Random(0))
        disk.stop_at = stop
        with suppress(Stopped):
            opened(disk, REPLICA)
        finished = disk.calls < stop
        disk.killed()
        store, recovery = opened(disk, REPLICA)
        queue = store.queue(*FIRST)
        assert recovery.walked_from > 0  # the units were not made anew
        assert (queue.next, queue.text_end) == (20, text_ends[19])
        if finished:
            break
    put(store, FIRST, b"another")
    store.publish(store.log.end)
    assert bodies(store, FIRST) == [*(b"%04d" % at * 10 for at in range(20)), b"another"]


@pytest.mark.parametrize("damaged", [b"0039" * 10, b"mark"])
@pytest.mark.parametrize("settings", [REPLICA, ON_DISK])
def test_queues_end_with_the_log(damaged: bytes, settings: StoreSettings) -> None:
    """No record to keep follows the damage. A killed process leaves all that it had, so the log becomes suspect."""
    disk = FaultyDisk(random.Random(0))
    store, _ = opened(disk, settings)
    for at in range(39):
        put(store, FIRST, b"%04d" % at * 10)
        if at == 15:
            store.sweep()
    put_record_group(store, ready(store, MARKS, b"mark"), [ready(store, FIRST, b"0039" * 10)])
    store.append()
    text_end = store.queue(*FIRST).text_end
    for queue in store.queues.values():
        queue.write()
    disk.killed()
    store, recovery = opened(punched(disk, damaged), settings)
    queue = store.queue(*FIRST)
    assert (recovery.walked_from > 0, recovery.cut) == (True, None)  # the units were not made anew
    assert (queue.next, queue.text_end, store.queue(*MARKS).next) == (39, text_end - 60, 0)
    assert store.suspicion.reason is not None
    put(store, FIRST, b"another")
    store.publish(store.log.end)
    assert bodies(store, FIRST) == [*(b"%04d" % at * 10 for at in range(39)), b"another"]


def test_damage_before_the_checkpoint_costs_no_other_record() -> None:
    """Durable records stay, whatever the level, but the log becomes suspect."""
    disk = written(REPLICA, 8).copy(random.Random(0))
    store, _ = opened(disk, REPLICA)
    store.close()
    log = disk.content(DATA / LOG / "00000000000000000000")
    at = log.index(b"0003" * 10)
    log[at : at + 40] = bytes(40)
    assert verify(DATA, disk).damages
    repair(DATA, disk)
    store, _ = opened(disk, REPLICA)
    assert bodies(store, FIRST) == [None if at == 3 else b"%04d" % at * 10 for at in range(8)]
    assert store.suspicion.reason is not None


def test_repairing_hides_nothing() -> None:
    """``metaq verify --repair`` opens the folder with settings of its own, and ends in order."""
    disk = written(REPLICA).copy(random.Random(0), reboot=True)
    repair(DATA, disk)
    assert opened(disk, REPLICA)[0].suspicion.reason is not None
