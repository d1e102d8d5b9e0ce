"""Transactions in random schedules of up to 40 steps: four branches and local transactions, with and without an outcome.

In between the process ends or the power is cut, at any call to the disk, also while the folder is opened; the disk is full,
retention deletes segments, snapshots are damaged and the clock goes back. What must hold: ``tests.crash.schedule``.

Replay one case: ``python -m tests.crash.transactions --seed N``.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

from metaq.message import Durability
from metaq.store.files.disk import File
from tests.crash.command import Result, main, run_until
from tests.crash.driver import case
from tests.crash.schedule import KEYS, STEPS, Schedule, settings
from tests.support.faultydisk import DATA, Stopped

MOST_STEPS: Final = 40
SNAPSHOT: Final = DATA / "config" / "transactions.json"
BACKUP: Final = DATA / "config" / "transactions.json.bak"


def run(seed: int, count: int) -> Result:
    """Live through ``count`` schedules."""
    return run_until(one_case, "schedules", seed, count, "transactions")


def one_case(seed: int) -> dict[str, int]:
    """Live one schedule; return how often what happened."""
    rng = random.Random(seed)
    with case("tests.crash.transactions", seed):
        life = _Life(rng)
        life.live(rng.randrange(MOST_STEPS // 2, MOST_STEPS + 1))
    return dict(life.counts)


class _Life:
    """One schedule."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.counts: Counter[str] = Counter(schedules=1)
        durability = rng.choice((Durability.DISK, Durability.DISK, Durability.MEMORY))
        self._schedule = Schedule(rng, settings(durability, rng.choice((4096, 4096, 8192))))
        self._operations: dict[Callable[[], None], int] = {
            self._begin: 6,
            self._put: 10,
            self._work: 24,
            self._step: 40,
            self._look: 12,
            self._go_on: 12,
            self._append: 8,
            self._finish: 24,
            self._fail: 3,
            self._late: 6,
            self._local: 6,
            self._expire: 1,
            self._save: 6,
            self._sweep: 3,
            self._checkpoint: 2,
            self._delete_expired: 8,
            self._stop: 1,
            self._end: 3,
        }
        if rng.random() < 0.2:  # much ages out
            self._operations |= {self._local: 50, self._delete_expired: 25}

    def live(self, steps: int) -> None:
        """So many steps, and a last look after a restart."""
        rng, schedule = self._rng, self._schedule
        operations, weights = tuple(self._operations), tuple(self._operations.values())
        self._arm()
        for operation in rng.choices(operations, weights, k=steps):
            try:
                operation()
                if rng.random() < 0.4:
                    schedule.check()
            except Stopped:
                self.counts["stopped at a call"] += 1
                self._restart()
            self.counts["steps"] += 1
        schedule.disk.stop_at = None
        schedule.finish()
        schedule.check()
        schedule.check_prepared()
        self._restart()
        self.counts["delivered"] += len(schedule.model.told.delivered)
        self.counts["still prepared"] += len(schedule.model.told.prepared)

    def _arm(self) -> None:
        """Perhaps all ends at one of the next calls."""
        disk, rng = self._schedule.disk, self._rng
        disk.stop_at = disk.calls + 1 + rng.randrange(rng.choice((20, 200))) if rng.random() < 0.3 else None

    def _restart(self) -> None:
        rng, schedule = self._rng, self._schedule
        aged = schedule.store.log.begin > 0
        while True:
            power = rng.random() < 0.5
            schedule.end(power=power)
            self.counts["power cuts" if power else "kills"] += 1
            if not aged and rng.random() < 0.1:
                self._damage()
            schedule.clock.jump(rng.choice((0, 0, 1, 1000, -1000, -100_000_000)))
            if rng.random() < 0.2:
                schedule.disk.stop_at = schedule.disk.calls + 1 + rng.randrange(20)
            try:
                schedule.open()
            except Stopped:
                self.counts["stopped while opening"] += 1
                continue
            self._arm()
            return

    def _damage(self) -> None:
        """Damage the snapshot, or both of its copies."""
        disk, rng = self._schedule.disk, self._rng
        for path in (SNAPSHOT, BACKUP)[: rng.choice((1, 1, 2))]:
            if path in dict(disk.files()):
                data = bytearray(disk.content(path))
                data[len(data) // 2 :] = b"" if rng.random() < 0.5 else b"x"
                disk.set_content(path, bytes(data))
                self.counts["snapshots damaged"] += 1

    # -- commands -----------------------------------------------------------------------------------------------------

    def _key(self) -> str:
        return self._rng.choice(KEYS)

    def _begin(self) -> None:
        self._schedule.begin(self._key())

    def _put(self) -> None:
        openly = list(self._schedule.model.open)
        key = self._rng.choice(openly) if openly and self._rng.random() < 0.8 else self._key()
        self._schedule.put(key, self._rng.choice((4, 4, 100, 700)))

    def _work(self) -> None:
        """A branch with messages, perhaps prepared."""
        key, model, rng = self._key(), self._schedule.model, self._rng
        if model.refusal("begin", key) is None and key not in model.told.prepared:
            self._schedule.begin(key)
            for _ in range(rng.choice((1, 2, 3))):
                self._schedule.put(key, rng.choice((4, 4, 100, 700)))
            if rng.random() < 0.5:
                self._schedule.step("prepare", key)

    def _step(self) -> None:
        """Run a command, mostly one that can do something now; in 5 % of the steps the disk has no room for it."""
        with self._schedule.full_disk() if self._rng.random() < 0.05 else nullcontext():
            self._schedule.step(*self._command())

    def _command(self) -> tuple[str, str]:
        rng, model = self._rng, self._schedule.model
        wanted = rng.choice(STEPS), self._key()
        for _ in range(4):
            if model.refusal(*wanted) is None:
                break
            wanted = rng.choice(STEPS), self._key()
        return wanted

    def _look(self) -> None:
        if self._schedule.look(*self._command()):
            self.counts["commits that are read first"] += 1

    def _go_on(self) -> None:
        """With a commit whose messages were being read."""
        for key in list(self._schedule.reading)[:1]:
            if self._rng.random() < 0.9:
                self._schedule.found(key)
            else:
                self._schedule.not_found(key)

    def _local(self) -> None:
        self._schedule.local(self._rng.choice((1, 2, 4)), self._rng.choice((4, 200, 700)))

    def _expire(self) -> None:
        self._schedule.expire()

    # -- turns and duties ---------------------------------------------------------------------------------------------

    def _append(self) -> None:
        self._schedule.append()

    def _finish(self) -> None:
        self._schedule.finish()

    def _fail(self) -> None:
        if self._schedule.staged:
            self.counts["appends that fail"] += 1
            self._schedule.append(full=True)

    def _late(self) -> None:
        if self._schedule.parked:
            self.counts["outcomes told early"] += 1
            self._schedule.late()

    def _save(self) -> None:
        self._schedule.save()

    def _sweep(self) -> None:
        self._schedule.append()
        self._schedule.store.sweep()

    def _checkpoint(self) -> None:
        self._schedule.append()
        self._schedule.checkpoint()

    def _delete_expired(self) -> None:
        """Run retention once or twice; what the first round puts again no longer holds back the second."""
        schedule, rng = self._schedule, self._rng
        schedule.append()
        begin = schedule.store.log.begin
        for _ in range(rng.choice((0, 2))):
            schedule.checkpoint()
        for _ in range(rng.choice((1, 2))):
            schedule.append()
            schedule.delete_expired(self._read)
            self.counts["branches put again"] += sum(flight.act.again for flight in schedule.staged)
            rng.choice((schedule.append, schedule.append, schedule.finish))()
            schedule.save()
        self.counts["segments deleted"] += (schedule.store.log.begin - begin) // schedule.settings.segment_bytes
        if rng.random() < 0.2:
            self._restart()

    def _read(self, file: File, size: int, offset: int) -> bytes:
        """A wait for the disk, in which others go on."""
        if self._rng.random() < 0.2:
            others = (self._begin, self._put, self._step, self._look, self._go_on, self._append, self._finish)
            self._rng.choice(others)()
        return file.read(size, offset)

    def _stop(self) -> None:
        """In order."""
        self.counts["orderly stops"] += 1
        self._schedule.close()
        self._restart()

    def _end(self) -> None:
        self._restart()


if __name__ == "__main__":
    main(one_case)
