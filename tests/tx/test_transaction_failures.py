"""Transactions over a disk that is full or fails, at each of their steps."""

import random
import zlib
from typing import Final

import pytest

from metaq.message import Durability
from metaq.protocol.record import constant_middle, host_bytes
from metaq.store.files.disk import Usage
from metaq.store.files.filecache import read_here
from metaq.store.messagestore import MessageStore
from metaq.store.newrecord import NewRecord
from metaq.tx.xacodes import XaCode, XaError
from tests.crash.driver import quiet
from tests.crash.schedule import LosesAll, Schedule
from tests.crash.schedule import settings as faulty_settings

HOST: Final = host_bytes("127.0.0.1", 8123)
SEGMENT: Final = 4096
"""Of the schedules' stores, in bytes."""


def test_the_vote_reserves_room_for_the_outcome() -> None:
    """MQ-071: who has voted yes can commit when nobody else may write; the vote refuses what could not be committed."""
    with quiet():
        schedule = Schedule(random.Random(0), faulty_settings(Durability.DISK))
        voted, late, one_phase = (f"XID:1:0a:0{number}:app" for number in range(3))
        for name in (voted, late, one_phase):
            schedule.begin(name)
            schedule.put(name)
        schedule.step("prepare", voted)
        schedule.finish()
        schedule.disk.room = Usage(used=1 << 20, available=2000)
        schedule.clock.advance(1)
        with pytest.raises(XaError, match="2000 bytes are free on the disk, 2233 are needed") as refused:
            schedule.tx.prepare(late)
        assert refused.value.code is XaCode.RBOTHER
        del schedule.model.open[late]
        schedule.store.no_room = "the disk is full"
        schedule.step("commit in one phase", one_phase)
        schedule.step("commit", voted)
        schedule.finish()
        schedule.check()
        assert [message.payload for message in schedule.model.told.delivered] == [b"0001"]
        assert schedule.model.open == {}


def test_a_store_that_takes_no_appends_takes_no_decision() -> None:
    """F-FAIL, MQ-071: its role has changed while the messages were read; the branch stays prepared for the next master."""
    with quiet():
        schedule = Schedule(random.Random(0), faulty_settings(Durability.DISK))
        name = "XID:1:0a:00:app"
        schedule.begin(name)
        schedule.put(name)
        schedule.step("prepare", name)
        schedule.finish()
        work = schedule.tx.commit(name, one_phase=False)
        messages = schedule.tx.messages(work, read_here)
        schedule.store.fence.close("the role of this replica changes; try again")
        with pytest.raises(XaError, match="stays as it was: the role of this replica changes") as refused:
            schedule.tx.store_commit(name, work, messages)
        assert refused.value.code is XaCode.RMFAIL
        assert schedule.store.settled


STEPS_FROM: Final = [
    ("prepare", "open"),
    ("commit in one phase", "open"),
    ("commit", "prepared"),
    ("rollback", "prepared"),
    ("decide commit", "prepared"),
    ("decide rollback", "prepared"),
    ("decide complete", "prepared"),
    ("forget", "decided"),
]
"""Every step that stores something, and what the branch is before it."""


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DISK])
@pytest.mark.parametrize(("command", "state"), STEPS_FROM)
@pytest.mark.parametrize("end", ["kill", "power cut", "goes on"])
def test_a_failed_append_at_each_step(command: str, state: str, durability: Durability, end: str) -> None:
    """MQ-071, MQ-076, MQ-107: what was open is rolled back, what was prepared or decided is that again."""
    name = "XID:1:0a:00:app"
    with quiet():
        schedule = Schedule(random.Random(0), faulty_settings(durability))
        schedule.begin(name)
        schedule.put(name)
        for before in {"open": (), "prepared": ("prepare",), "decided": ("prepare", "decide rollback")}[state]:
            schedule.step(before, name)
            schedule.finish()
        schedule.step(command, name)
        schedule.append(full=True)
        schedule.sync()
        schedule.check()
        schedule.check_prepared()
        if end != "goes on":
            schedule.end(power=end == "power cut")
            schedule.open()
        assert list(schedule.model.told.prepared) == ([name] if state == "prepared" else [])
        assert list(schedule.model.told.heuristic) == ([name] if state == "decided" else [])
        assert schedule.model.told.delivered == []
        schedule.step("commit" if state == "prepared" else "forget", name)
        schedule.finish()
        schedule.check()
        assert len(schedule.model.told.delivered) == (state == "prepared")


@pytest.mark.parametrize(("command", "state"), STEPS_FROM)
def test_no_room_for_the_next_segment_at_each_step(command: str, state: str) -> None:
    """MQ-071, MQ-107: refused while it is staged: RBOTHER and gone when it was open, else RMFAIL and as it was."""
    name, filler = "XID:1:0a:00:app", "XID:1:0a:01:app"
    with quiet():
        schedule = Schedule(random.Random(0), faulty_settings(Durability.DISK))
        schedule.begin(name)
        schedule.put(name, 700)
        schedule.put(name, 400)
        for before in {"open": (), "prepared": ("prepare",), "decided": ("prepare", "decide rollback")}[state]:
            schedule.step(before, name)
            schedule.finish()
        fill_segment(schedule.store)
        with schedule.full_disk():
            schedule.step(command, name)
        assert schedule.staged == []
        schedule.check()
        schedule.begin(filler)
        assert (name in schedule.model.told.prepared) is (state == "prepared")
        assert name not in schedule.model.open
        schedule.end(power=True)
        schedule.open()


def fill_segment(store: MessageStore) -> None:
    """Leave no room for another record in the last segment."""
    middle = constant_middle(0, 0, HOST, 0, HOST)
    empty = NewRecord(queue=store.queue("others", 0), flag=0, body=b"", crc=0, middle=middle, text_size=20)
    body = bytes(store.log.room_end - store.log.end - empty.size - 50)
    store.put(*empty._replace(body=body, crc=zlib.crc32(body) & 0x7FFFFFFF, text_size=20 + len(body)))
    store.append()
    store.sync()


def test_a_place_is_needed_until_its_successor_is_durable() -> None:
    """MQ-107: at level MEMORY a branch that was put again could be lost with a segment and a power cut."""
    name = "XID:1:0a:00:app"
    with quiet():
        schedule = Schedule(LosesAll(0), faulty_settings(Durability.MEMORY))
        schedule.begin(name)
        schedule.put(name)
        schedule.step("prepare", name)
        schedule.finish()
        while schedule.store.log.begin + SEGMENT > schedule.store.log.end:
            schedule.local(4, 200)
            schedule.finish()
        schedule.save()
        schedule.checkpoint()
        schedule.checkpoint()
        for _ in range(3):
            schedule.delete_expired(read_here)
            schedule.append()
        assert schedule.store.log.begin == 0
        schedule.end(power=True)
        schedule.open()
        assert list(schedule.model.told.prepared) == [name]
        for _ in range(2):
            schedule.checkpoint()
            schedule.checkpoint()
            schedule.delete_expired(read_here)
            schedule.finish()
            schedule.save()
        assert schedule.store.log.begin > 0
