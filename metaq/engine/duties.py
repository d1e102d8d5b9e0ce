"""Background work on the store while the broker serves: syncs, sweeps, checkpoints, retention, and saving tables."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from metaq.engine.context import Context
from metaq.engine.role import NO_PARTS, Keeper
from metaq.engine.tables.groups import GroupTable
from metaq.engine.tables.modes import ModeTable
from metaq.engine.tables.topics import TopicTable
from metaq.engine.turn import Turns
from metaq.engine.writing import note
from metaq.errors import MetaqError
from metaq.store.expiry import delete_expired
from metaq.store.files.filecache import Run

logger = logging.getLogger(__name__)
T = TypeVar("T")

EXPIRE_S: Final = 0.1
SAVE_TABLES_S: Final = 1.0
"""The time between two looks at the tables; a change of a topic is saved without waiting for it."""
SAVE_SHARE: Final = 20
"""The pause after tables were saved is at least this many times what it took, so that thousands of new topics can be made."""
LONG_S: Final = 1.0
"""A stop that takes longer is logged with what it waited for: puts may be waiting for the next master."""
REST_S: Final = 0.001
"""The hub serves connections before it runs a timer, but not between callbacks. So a rest must never be a sleep of 0."""
SWEEP_SHARE: Final = 20
"""The pause after a sweep is at least this many times its work, so that sweeping takes at most 5 % of the time."""


class _Ended(Exception):
    """Raised inside a duty when the broker stops, to end the duty early."""


class Duties:
    """The greenlets that do background work on the store: each repeats one duty."""

    def __init__(self, context: Context, turns: Turns, run: Run, saved: Callable[[], None] = NO_PARTS.saved) -> None:
        """Create them; ``saved`` is called when a table was saved."""
        self._settings = context.settings
        self._store = context.store
        self._topics = context.topics
        self._groups = context.groups
        self._modes = context.modes
        self._turns = turns
        self._run = run
        self._saved = saved
        self._saving_topics = BoundedSemaphore(1)
        self._saving_groups = BoundedSemaphore(1)
        self._saving_modes = BoundedSemaphore(1)
        self._deleting_expired = BoundedSemaphore(1)
        self._topics_changed = Event()
        self._failing: dict[str, str] = {}  # the reason, by duty
        self._short = False  # puts are refused for lack of disk space, and that was logged
        self._rested_s = 0.0  # time spent resting in the current sweep
        self._busy: list[str] = []  # names of the duties that are running
        self._stopping = False
        self._saves_tables = context.replicas.is_master  # a slave has the tables of its master
        self._keepers: Sequence[Keeper] = ()
        self._syncing: Any = None
        self._greenlets: list[Any] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self, keepers: Sequence[Keeper]) -> None:
        """Begin; ``keepers`` need some records for longer than retention keeps them."""
        settings, self._keepers = self._settings, keepers
        self._syncing = gevent.spawn(self._turns.sync_forever)  # first: puts come already, and retention may look for long
        self.every(EXPIRE_S, self._turns.expire)
        self._do(self._look_after_retention)
        self._greenlets.append(gevent.spawn(self._sweep_forever))
        self.every(settings.sweep_interval_ms / 1000, self._prepare_segment)
        self.every(settings.sweep_interval_ms / 1000, self._index_keys)
        self.every(settings.checkpoint_interval_ms / 1000, self._checkpoint)
        self._greenlets.append(gevent.spawn(self._save_tables_forever))
        self.every(settings.retention_interval_ms / 1000, self._look_after_retention)

    def every(self, pause_s: float, duty: Callable[[], None]) -> None:
        """Repeat a duty until the broker stops, with a pause of ``pause_s`` seconds after each run."""
        self._greenlets.append(gevent.spawn(self._repeat, pause_s, duty))

    def pause(self) -> None:
        """Begin no more duties, and abandon a running checkpoint: a durable close of the store makes its own."""
        self._stopping = True

    def ending(self) -> bool:
        """Return whether running duties should end early, because the broker stops."""
        return self._stopping

    def stop(self, deadline_s: float) -> bool:
        """End all duties; return false when the disk did not answer within ``deadline_s`` seconds."""
        self._turns.stop()
        if self._syncing is None:  # never started: a master without room for its first record does not start its duties
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

    def _do(self, duty: Callable[[], None], name: str = "") -> None:
        if self._stopping:
            return
        name = name or duty.__name__
        self._busy.append(name)
        try:
            duty()
        except MetaqError as error:  # the next round tries again; the store itself decides what it means for puts
            self._failed(name, str(error))
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # an unexpected error must not end the duty for ever
            logger.exception("duty failed duty=%s", name)
        else:
            if self._failing.pop(name, None) is not None:
                logger.info("duty works again duty=%s", name)
        finally:
            self._busy.remove(name)
        self._tell_of_room()

    def _failed(self, name: str, reason: str) -> None:
        """Log a failure once for each reason, not at every try."""
        if self._failing.get(name) != reason:
            logger.error("duty failed duty=%s reason=%s", name, reason)
        self._failing[name] = reason

    def _tell_of_room(self) -> None:
        """Log when puts are refused for lack of disk space, and when they are taken again."""
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
        self._store.log.prepare(self._run, self._turns.run_sync)

    def _index_keys(self) -> None:
        self._store.index_keys(self._run)

    def _checkpoint(self) -> None:
        if self._store.failure is not None:
            return
        self.save_topics()
        self.settle()
        with contextlib.suppress(_Ended):
            self._store.checkpoint(self._unless_ended(self._run), self.rest, self._unless_ended(self._turns.run_sync))

    def _unless_ended(self, run: Run) -> Run:
        """Return a way to run calls as ``run`` does until the broker stops; then it raises ``_Ended``."""

        def run_unless_ended(call: Callable[[], T]) -> T:
            if self._stopping:
                raise _Ended
            return run(call)

        return run_unless_ended

    def save_topics(self) -> None:
        """Make the topic table durable if it has changed; a slave saves nothing, since it has its master's table."""
        self._save(self._topics, self._saving_topics)

    def topic_changed(self) -> None:
        """Save the table of topics soon: a killed broker forgets what it has not saved, such as how many partitions one had."""
        self._topics_changed.set()

    def _save_tables_forever(self) -> None:
        clock = self._store.clock
        while True:
            self._topics_changed.wait(SAVE_TABLES_S)
            self._topics_changed.clear()
            started = clock.monotonic()
            self._do(self._save_changed_tables)
            gevent.sleep(SAVE_SHARE * (clock.monotonic() - started))

    def _save_changed_tables(self) -> None:
        if self._store.failure is None:
            self.save_topics()
            self.save_groups()
            self.save_modes()

    def save_groups(self) -> None:
        """Make the table of groups durable if it has changed, as ``save_topics`` does."""
        self._save(self._groups, self._saving_groups)

    def save_modes(self) -> None:
        """Make the table of request modes durable if it has changed, as ``save_topics`` does."""
        self._save(self._modes, self._saving_modes)

    def _save(self, table: TopicTable | GroupTable | ModeTable, saving: BoundedSemaphore) -> None:
        with saving:
            self._store.check_healthy()
            if table.unsaved and self._saves_tables:
                table.save(self._store.disk, self._store.clock.now_ms(), self._run)
                self._saved()

    def settle(self) -> None:
        """End the current turn: a greenlet that waited for the disk may resume in the middle of one.

        Clients that are answered at its end may begin another; ``metaq.server.wire.pace`` bounds how often.
        """
        while not self._store.settled:
            self._turns.finish()

    def rest(self) -> None:
        """Let all other greenlets run, and return at the end of a turn."""
        gevent.sleep(REST_S)
        self.settle()

    def _rest_in_sweep(self) -> None:
        began = self._store.clock.monotonic()
        self.rest()
        self._rested_s += self._store.clock.monotonic() - began

    def delete_expired(self) -> None:
        """Delete expired segments now, at any hour; the second round deletes what keepers have looked at in the first."""
        for _ in range(2):
            self._delete_expired(at_any_hour=True)

    def _look_after_retention(self) -> None:
        self._delete_expired(at_any_hour=False)

    def _delete_expired(self, *, at_any_hour: bool) -> None:
        with self._deleting_expired:
            oldest = [keeper.oldest for keeper in self._keepers]
            needed = min((each for each in oldest if each is not None), default=None)
            decision = delete_expired(self._store, self._run, self.rest, at_any_hour=at_any_hour, needed_from=needed)
            if decision.due_before is not None:
                for keeper in self._keepers:  # the segments that they still need now are deleted in the next round
                    self._do(partial(keeper.keep, decision.due_before), f"{type(keeper).__name__}.keep")
                note(self._turns, _nobody)  # a keeper that needs no outcome only stages
        if decision.delete:
            logger.info("segments deleted bases=%s", decision.delete)


def _nobody(error: MetaqError | None) -> None:
    """Ignore the outcome: the next round looks again at what there is."""
