"""The life of one group of replicas under load: one fault after another, and checks after each and at the end.

After each fault: puts are acknowledged again in time, every client succeeds, all replicas are in sync. At the end every replica
is read whole and compared with the history, and their logs with each other, byte by byte.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import ClassVar, Final

from metaq.client import TextClient
from metaq.protocol.remoting.codes import Request
from metaq.store.recovery.verify import verify
from tests.cluster import promised
from tests.cluster.history import TOPICS, History, Progress
from tests.cluster.load import Consumer, Load, Putter, Reader, Sender, Worker
from tests.cluster.transactional import CHECKS, Brancher, HalfSender
from tests.crash.command import expect
from tests.support.admin import ask
from tests.support.broker import wait_until
from tests.support.canary import Canary
from tests.support.cluster import ROLE_CHANGES, compare_logs
from tests.support.group import Group, Member
from tests.support.remoting import RemotingClient
from tests.support.talk import Talk

AGAIN_S: Final = 10.0
"""In which puts must be acknowledged again, and as much longer as the machine was late meanwhile."""
EXCUSED: Final = "excused by the canary"
STUCK_S: Final = 60.0
"""What takes longer, while nothing is wrong any more, is stuck."""
CLIENTS: Final = (Putter, Putter, Sender, Reader, Consumer, Brancher, HalfSender)
WITH_TRANSACTIONS: Final = 1 / 3
"""Of all rounds."""
LOOK_S: Final = 0.02

Fault = Callable[[], float]
"""Makes a fault, and ends when puts are acknowledged again; returns since when they should have been."""


class CalledOff(Exception):
    """Another life has failed."""


class Campaign:
    """The state shared by lives that run at the same time, in several processes."""

    def __init__(self, unit: str, count: int, context: SpawnContext) -> None:
        """Until so many faults of the unit have been made."""
        self._unit = unit
        self._missing = context.Value("i", count)
        self._called_off = context.Event()

    @property
    def done(self) -> bool:
        return int(self._missing.value) <= 0

    def made(self, counts: Counter[str]) -> None:
        """These faults."""
        with self._missing.get_lock():
            self._missing.value -= counts[self._unit]

    def call_off(self) -> None:
        self._called_off.set()

    def check(self) -> None:
        """:class:`CalledOff`."""
        if self._called_off.is_set():
            raise CalledOff


class Life:
    """One group from its start to its end. A subclass says what goes wrong."""

    proxied: ClassVar[bool] = False
    kind: ClassVar[type[Member]] = Member
    clients: ClassVar[tuple[type[Worker], ...]] = CLIENTS
    flags: ClassVar[tuple[str, ...]] = ()
    """Of all replicas."""
    durabilities: ClassVar[tuple[str, ...]] = ("replica", "replica", "disk+replica")
    """Of which one is drawn."""

    def __init__(self, seed: int, folder: Path, zookeeper: str, campaign: Campaign | None = None) -> None:
        self.rng = random.Random(seed)
        self.canary = Canary(folder)
        self.history, self.progress = History(seed), Progress(self.canary.late_s)
        self.campaign = campaign
        self.least, self.durability = self.rng.choice((1, 2, 2)), self.rng.choice(self.durabilities)
        flags = (*CHECKS, "--min-in-sync", str(self.least), *self.flags)
        self.group = Group(
            folder, zookeeper, *flags, proxied=self.proxied, seed=seed, durability=self.durability, kind=self.kind
        )
        self.load = Load(self.group.ports(), self.history, self.progress, seed)
        self.counts: Counter[str] = Counter({f"groups with min_in_sync {self.least}": 1, f"groups at {self.durability}": 1})
        self.pauses: list[tuple[float, str]] = []
        """For how long nothing was acknowledged, of each fault that a new master ends, in seconds."""
        self.doing = "start"
        self._epoch = 0
        self._began = 0.0
        self._same = (0, 0)
        """Begin and end of the log, when all replicas had the same."""

    def faults(self) -> dict[Fault, int]:
        """Return the faults that this kind of life makes, and how often it makes each."""
        raise NotImplementedError

    def live(self, rounds: int) -> None:
        """So many faults, fewer when all lives together have had enough, and the end."""
        with self.living():
            faults = self.faults()
            for fault in self.rng.choices(list(faults), list(faults.values()), k=rounds):
                before = self.counts.copy()
                self.round(fault)
                if self.campaign is not None:
                    self.campaign.made(self.counts - before)
                    if self.campaign.done:
                        break

    @contextmanager
    def living(self) -> Iterator[None]:
        """The group and its clients run; everything is compared in the end."""
        with self.canary, self.group:
            try:
                self._begin()
                yield
                self._end()
            finally:
                self.load.ended.set()

    def _begin(self) -> None:
        """Make the topics, and start the clients when all replicas know them."""
        master = self.group.wait_master()
        with TextClient(master.host, master.port) as client:
            for topic, partitions in TOPICS.items():
                client.create(topic, partitions)
        promised.create(master.host, master.port)
        self.wait(lambda: all(map(_knows_topics, self.group.members.values())), "all replicas know the topics")
        self.load.start(self.clients)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def round(self, fault: Fault) -> None:
        """One fault under load, with or without transactions, and its end."""
        self.doing = getattr(fault, "__name__", repr(fault))
        if self.rng.random() < WITH_TRANSACTIONS:
            self.load.transactions.set()
            self.counts["with transactions"] += 1
        began = time.monotonic()
        self.wait(lambda: self.load.all_succeeded_since(began), "every client succeeds")
        self.pass_time(self.rng.uniform(0, 0.8))
        since, excused = fault(), self.progress.excused
        now = time.monotonic()
        pause = self.history.longest_pause(since, now)
        if pause > AGAIN_S:
            late_s = self.canary.late_s(since, now)
            expect(pause <= AGAIN_S + late_s, f"puts were acknowledged again after {pause:.1f} s", self.doing, late_s)
            self.counts[EXCUSED] += 1
        if self.history.epoch > self._epoch:
            self.pauses.append((round(pause, 2), self.doing))
        self.group.heal()
        self.wait(self.group.whole, "all replicas are in sync again")
        healed = time.monotonic()
        self.wait(lambda: self.load.all_succeeded_since(healed), "every client succeeds again")
        self.load.transactions.clear()
        self.counts[EXCUSED] += self.progress.excused - excused
        self.counts[self.doing.replace("_", " ")] += 1

    def fault_begins(self) -> float:
        """The moment before a fault is made."""
        self._epoch = self.history.epoch
        self._began = self.progress.fault_at = time.monotonic()
        return self._began

    def wait_new_master(self) -> None:
        """Wait until puts are acknowledged by another master than before the fault."""
        self.wait(lambda: self.history.epoch > self._epoch, "puts are acknowledged in a new epoch")

    def wait_acknowledged(self, since: float) -> None:
        """Wait until a put is acknowledged that was sent after a moment."""
        self.wait(lambda: self.history.newest > since, "puts are acknowledged again")

    def pass_time(self, seconds: float) -> None:
        """Go on with the fault for so long."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, "time passes")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until it holds, or a client has seen what must not be."""

        def look() -> bool:
            if self.campaign is not None:
                self.campaign.check()
            self.load.check()
            return condition()

        try:
            wait_until(look, STUCK_S, what, LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; last successes: {self.load.ages()}") from error

    def slaves(self, master: Member) -> list[Member]:
        """All others, in any order."""
        return self.rng.sample([member for member in self.group.members.values() if member is not master], 2)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Decide what is undecided, stop the clients, and compare everything."""
        self.doing = "end"
        self.load.closing.set()
        self.wait(self.load.settled, "all transactions are decided, and all promises kept")
        self.load.stop()
        self.load.check()
        with Talk(self.group.wait_master()) as talk:
            expect(talk.recover() == [], "no branch is prepared any more", talk.recover())
        self.last_fault()
        self.wait(self._equal, "all replicas have the same end")
        members = list(self.group.members.values())
        for member in members:
            self.history.check(member.host, member.port)
            for worker in self.load.workers:
                worker.check(member.host, member.port)
        begin, end = self._same
        for member in members[1:]:
            compare_logs(members[0].data, member.data, begin, end)
        for member in members:
            expect(member.terminate() == 0, "an orderly stop", member.stderr()[-2000:])
            expect("Traceback" not in member.stderr(), "no surprises", _surprise(member.stderr()))
            report = verify(member.data)
            expect(not report.damages and not report.quarantined_bytes, "nothing is damaged", member.number, report)
        for counts in (self.history.counts, *(worker.counted() for worker in self.load.workers)):
            self.counts.update(counts)

    def last_fault(self) -> None:
        """Something after which no client goes on."""

    def _equal(self) -> bool:
        """Return whether all replicas report the same log, and note its bounds then: more may be put at any time."""
        looks = [member.look() for member in self.group.members.values()]
        ends = {(look["begin"], look["end"], look["end"] - look["readable_end"]) for look in looks if look is not None}
        if None in looks or len(ends) != 1:
            return False
        [(begin, end, _)] = ends
        self._same = (begin, end)
        return True


def _knows_topics(member: Member) -> bool:
    try:
        with RemotingClient(member.host, member.port) as client:
            known = ask(client, Request.GET_ALL_TOPIC_CONFIG).body
            return all(f'"{topic}"'.encode() in known for topic in (*TOPICS, *promised.TOPICS))
    except ROLE_CHANGES:
        return False


def _surprise(text: str) -> str:
    at = max(0, text.find("Traceback"))
    return text[max(0, at - 500) : at + 2000]
