"""Looking after the store while the broker serves: syncing, sweeping, checkpoints, retention, tables."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import gevent
from gevent.lock import BoundedSemaphore

from metaq.engine.context import Context
from metaq.engine.turn import Turns
from metaq.engine.writing import note
from metaq.errors import MetaqError, StoreError
from metaq.store.expiry import retire
from metaq.store.files.filecache import Run

logger = logging.getLogger(__name__)
T = TypeVar("T")

EXPIRE_S: Final = 0.1
SAVE_TABLES_S: Final = 1.0
LONG_S: Final = 1.0
"""An end that takes longer says what it has waited for: puts may wait for the broker that comes after it."""
REST_S: Final = 0.001
"""The hub looks after connections before it looks at a timer, but not between callbacks: no rest may be a sleep of 0."""
SWEEP_SHARE: Final = 20
"""A sweep's pause is at least this many times its own work, so that it costs at most 5 % of the time."""


class Keeper(Protocol):
    """Puts again what it needs of segments that are about to be deleted."""

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that it needs; nothing from there on is deleted."""
        ...

    def keep(self, before: int) -> None:
        """Need nothing before a log offset any more, soon."""
        ...


class _Ended(Exception):
    """The duty is not wanted any more."""


class Duties:
    """The greenlets that look after the store."""

    def __init__(self, context: Context, turns: Turns, run: Run) -> None:
        self._settings = context.settings
        self._store = context.store
        self._topics = context.topics
        self._groups = context.groups
        self._turns = turns
        self._run = run
        self._saving_topics = BoundedSemaphore(1)
        self._saving_groups = BoundedSemaphore(1)
        self._retiring = BoundedSemaphore(1)
        self._failing: dict[str, str] = {}  # why, by duty
        self._short = False  # of room, and said so
        self._rested_s = 0.0  # in the sweep that is being done
        self._busy: list[str] = []  # names of duties that are being done
        self._stopping = False
        self.saves_tables = True
        """False for a slave, which has those of its master."""
        self.keepers: list[Keeper] = []
        """Who needs records for longer than retention keeps them."""
        self._syncing: Any = None
        self._greenlets: list[Any] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        settings = self._settings
        self._do(self._look_after_retention)
        self._syncing = gevent.spawn(self._turns.sync_forever)
        self._greenlets.append(gevent.spawn(self._sweep_forever))
        self.every(EXPIRE_S, self._turns.expire)
        self.every(settings.sweep_interval_ms / 1000, self._prepare_segment)
        self.every(settings.sweep_interval_ms / 1000, self._index_keys)
        self.every(settings.checkpoint_interval_ms / 1000, self._checkpoint)
        self.every(SAVE_TABLES_S, self._save_changed_tables)
        self.every(settings.retention_interval_ms / 1000, self._look_after_retention)

    def every(self, pause_s: float, duty: Callable[[], None]) -> None:
        """Do a duty again and again until the broker stops."""
        self._greenlets.append(gevent.spawn(self._repeat, pause_s, duty))

    def pause(self) -> None:
        """Begin no more duties, and give up a checkpoint that is being made: who closes the store durably makes one."""
        self._stopping = True

    def stop(self, deadline_s: float) -> bool:
        """End them all; false when the disk did not answer within ``deadline_s``."""
        self._turns.stop()
        if self._syncing is None:  # a master that has no room to be one never starts
            return True
        clock = self._store.clock
        began, waited_for = clock.monotonic(), set[str]()
        while (left := self._at_work()) and clock.monotonic() - began < deadline_s:
            waited_for.update(left)
            gevent.sleep(0.005)
        waited_s = clock.monotonic() - began
        if waited_s > LONG_S:
            logger.warning("the end waited for duties ms=%d duties=%s", round(waited_s * 1000), ",".join(sorted(waited_for)))
        gevent.killall(self._greenlets)
        return not left

    def _at_work(self) -> list[str]:
        return self._busy if self._syncing.dead else [*self._busy, "sync"]

    # -- doing --------------------------------------------------------------------------------------------------------

    def _repeat(self, pause_s: float, duty: Callable[[], None]) -> None:
        while True:
            gevent.sleep(pause_s)
            self._do(duty)

    def _do(self, duty: Callable[[], None]) -> None:
        if self._stopping:
            return
        name = duty.__name__
        self._busy.append(name)
        try:
            duty()
        except StoreError as error:  # the next round tries again; what it means for puts the store itself knows
            self._failed(name, str(error))
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # a duty that met what nobody expected must not end for ever
            logger.exception("duty failed duty=%s", name)
        else:
            if self._failing.pop(name, None) is not None:
                logger.info("duty works again duty=%s", name)
        finally:
            self._busy.remove(name)
        self._tell_of_room()

    def _failed(self, name: str, reason: str) -> None:
        """Say it once a reason, not once a try."""
        if self._failing.get(name) != reason:
            logger.error("duty failed duty=%s reason=%s", name, reason)
        self._failing[name] = reason

    def _tell_of_room(self) -> None:
        """Say it when puts are refused for want of room, and when they are taken again."""
        shortage = self._store.shortage
        if shortage is not None and not self._short:
            logger.error("puts are refused reason=%s", shortage)
        elif shortage is None and self._short:
            logger.info("puts are taken again")
        self._short = shortage is not None

    def _sweep_forever(self) -> None:
        pause_s, clock = self._settings.sweep_interval_ms / 1000, self._store.clock
        while True:
            self._rested_s = 0.0
            started = clock.monotonic()
            self._do(self._sweep)
            gevent.sleep(max(pause_s, SWEEP_SHARE * (clock.monotonic() - started - self._rested_s)))

    def _sweep(self) -> None:
        self.settle()
        self._store.sweep(self._rest_in_sweep)

    def _prepare_segment(self) -> None:
        self._store.log.prepare(self._run)

    def _index_keys(self) -> None:
        self._store.index_keys(self._run)

    def _checkpoint(self) -> None:
        if self._store.failure is not None:
            return
        self.save_topics()
        self.settle()
        with contextlib.suppress(_Ended):
            self._store.checkpoint(self._run_unless_ended, self.rest)

    def _run_unless_ended(self, call: Callable[[], T]) -> T:
        if self._stopping:
            raise _Ended
        return self._run(call)

    def save_topics(self) -> None:
        """Make the topic table durable when it has changed."""
        with self._saving_topics:
            self._store.check_healthy()
            if self._topics.unsaved and self.saves_tables:
                self._topics.save(self._store.disk, self._store.clock.now_ms(), self._run)

    def _save_changed_tables(self) -> None:
        if self._store.failure is None:
            self.save_topics()
            self.save_groups()

    def save_groups(self) -> None:
        """Make the table of groups durable when it has changed."""
        with self._saving_groups:
            self._store.check_healthy()
            if self._groups.unsaved and self.saves_tables:
                self._groups.save(self._store.disk, self._store.clock.now_ms(), self._run)

    def settle(self) -> None:
        """Wait for the end of the turn: who has waited for the disk may come back in the middle of one."""
        while not self._store.settled:
            gevent.sleep(0)

    def rest(self) -> None:
        """Let everybody else go on."""
        gevent.sleep(REST_S)
        self.settle()

    def _rest_in_sweep(self) -> None:
        began = self._store.clock.monotonic()
        self.rest()
        self._rested_s += self._store.clock.monotonic() - began

    def delete_expired(self) -> None:
        """Delete what has expired, whatever the hour."""
        self._retire(at_any_hour=True)

    def _look_after_retention(self) -> None:
        self._retire(at_any_hour=False)

    def _retire(self, *, at_any_hour: bool) -> None:
        with self._retiring:
            oldest = [keeper.oldest for keeper in self.keepers]
            needed = min((each for each in oldest if each is not None), default=None)
            decision = retire(self._store, self._run, self.rest, at_any_hour=at_any_hour, needed_from=needed)
            if decision.due_before is not None:
                for keeper in self.keepers:  # what they keep goes in the next round
                    keeper.keep(decision.due_before)
                note(self._turns, _nobody)  # a keeper that does not care how it ends only stages
        if decision.delete:
            logger.info("segments deleted bases=%s", decision.delete)


def _nobody(error: MetaqError | None) -> None:
    """The next round looks again at what there is."""
