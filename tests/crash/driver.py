"""Random work on a store over a faulty disk, which the model follows."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Final, TypeVar

from metaq.errors import DiskFull
from metaq.message import Durability, TopicPartition
from metaq.store.expiry import delete_expired
from metaq.store.files.disk import Usage
from metaq.store.files.documents import read_document, write_document
from metaq.store.files.filecache import read_here, run_here
from metaq.store.log.retention import RetentionRules
from metaq.store.messagestore import LOG
from metaq.store.recovery.recovery import Recovery, open_store
from metaq.store.recovery.verify import repair, verify
from metaq.store.settings import StoreSettings
from tests.crash.command import expect
from tests.crash.model import KEYS, MARKS, Model, Put, compare, random_message
from tests.support.faultydisk import DATA, EMPTY, FaultyDisk
from tests.support.manualclock import ManualClock

T = TypeVar("T")

NEARLY_FULL: Final = Usage(used=87, available=13)
DOCUMENT: Final = DATA / "topics.json"


class GivenUp(BaseException):
    """The caller of the store ends while it waits for the disk, as a greenlet that is killed when the broker stops."""


class CaseFailed(AssertionError):
    """A random case broke a promise; the text says how to run it alone."""


@contextmanager
def quiet() -> Iterator[None]:
    """The reports of the code under test are left out: damage is what these tests make."""
    logger = logging.getLogger("metaq")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def case(module: str, seed: int) -> Iterator[None]:
    """Around one case: quiet, and its failure names the seed that replays it."""
    with quiet():
        try:
            yield
        except Exception as error:
            raise CaseFailed(f"{error!r}\nreplay: python -m {module} --seed {seed}") from error


def random_settings(rng: random.Random) -> StoreSettings:
    """Small files, so that a few messages roll segments and queue files."""
    return StoreSettings(
        segment_bytes=rng.choice((4096, 8192, 16384)),
        queue_file_bytes=rng.choice((64, 256, 512)),
        index_slots=rng.choice((1, 5)),
        index_entries=rng.choice((8, 40)),
        hot_bytes=rng.choice((0, 2000, 1 << 20)),
        open_files=rng.choice((2, 4, 64)),
        sync_together=rng.choice((1, 2, 32)),
        slice_ms=rng.choice((0, 5)),
        durability=rng.choice((Durability.DISK, Durability.DISK, Durability.MEMORY)),
        retention=RetentionRules(keep_ms=1000, ample_free_bytes=1 << 30, least_free_bytes=1),
    )


class Driver:
    """One data folder through many processes: opens, works, and keeps the model in step."""

    def __init__(self, rng: random.Random, disk: FaultyDisk, settings: StoreSettings) -> None:
        self.rng = rng
        self.disk = disk
        self.settings = settings
        self.clock = ManualClock()
        self.model = Model()
        self.document = 0
        self.document_tried = 0
        self.interleaved = True
        """Whether other work goes on while an operation waits for the disk."""
        self._depth = 0
        self._at_work: set[str] = set()
        self._give_up = False
        self._recovered = True

    def fork(self, disk: FaultyDisk) -> "Driver":
        """The same folder's future on another disk."""
        twin = Driver(self.rng, disk, self.settings)
        twin.model = self.model.copy()
        twin.document, twin.document_tried = self.document, self.document_tried
        return twin

    def ended(self, *, power: bool) -> None:
        """The process is gone, and with ``power`` the machine too: all that was not synced is at risk."""
        if power:
            self.disk = self.disk.power_cut(self.rng)
            self._recovered = False
        else:
            self.disk.killed()
        self.model.ended(power=power)

    def open(self) -> Recovery:
        """Open the folder and compare it with the model."""
        self.store, recovery = open_store(DATA, self.settings, self.clock, self.disk)
        self._recovered = True
        self.model.check(self.store, self.rng)
        self._check_document()
        return recovery

    def _check_document(self) -> None:
        content, problems = read_document(self.disk, DOCUMENT)
        version = 0 if content is None else content["version"]
        expect(self.document <= version <= self.document_tried, "a document is never torn or old", version, self.document)
        expect(not problems, "no copy of a document is torn", problems)
        self.document = self.document_tried = version

    # -- single operations --------------------------------------------------------------------------------------------

    def put(self) -> None:
        """One turn of the loop: some messages, perhaps a group among them, one append.

        Raises ``DiskFull`` when any of them was refused.
        """
        largest = self.settings.segment_bytes - 400 if self.rng.random() < 0.1 else 600
        count = self.rng.choice((1, 1, 2, 5))
        puts = [[(self.rng.choice(KEYS), *random_message(self.rng, largest))] for _ in range(count)]
        if self.rng.random() < 0.3:
            members = [(self.rng.choice(KEYS), *random_message(self.rng, 600)) for _ in range(self.rng.choice((1, 2, 4)))]
            puts.insert(self.rng.randrange(count + 1), [(MARKS, self.rng.randbytes(20), 0, None), *members])
        self._turn(puts)

    def put_messages(self, messages: Sequence[Put]) -> None:
        """One turn of the loop with these."""
        self._turn([[message] for message in messages])

    def _turn(self, puts: Sequence[Sequence[Put]]) -> None:
        """Single messages, and groups that begin with their mark."""
        self.store.check_writable()
        refused: DiskFull | None = None
        for put in puts:
            try:
                if len(put) == 1:
                    self.model.put(self.store, put[0])
                else:
                    self.model.put_group(self.store, put)
            except DiskFull as error:  # the turn goes on without this one
                refused = error
        try:
            self.store.append()
        except DiskFull:
            self.model.refused()
            raise
        self.model.appended()
        self.check_readable()
        if refused is not None:
            raise refused

    def sync(self) -> None:
        with self._alone("sync") as free:
            if free:
                covered = self.model.before_sync()
                self.store.sync(self.run)
                self.model.synced(covered)

    def sweep(self) -> None:
        with self._alone("sweep") as free:
            if free:
                self.store.sweep(self.rest)

    def index_keys(self) -> None:
        with self._alone("index keys") as free:
            if free:
                self.store.index_keys(self.run)

    def prepare(self) -> None:
        with self._alone("prepare") as free:
            if free:
                self.store.log.prepare(self.run, self.run)

    def checkpoint(self) -> None:
        with self._alone("checkpoint") as free:
            if free:
                covered = self.model.before_sync()
                self.store.checkpoint(self.run, self.rest, self.run)
                self.model.synced(covered)

    def delete_expired(self) -> None:
        """Delete old segments, often after two checkpoints, which let go of nearly all."""
        for _ in range(self.rng.choice((0, 2, 2))):
            self.checkpoint()
        with self._alone("delete expired") as free:
            if free:
                self.model.begin_allowed = self.store.log.segments[-1].base
                self.disk.room = NEARLY_FULL
                delete_expired(self.store, self.run, self.rest)
                self.disk.room = EMPTY
                delete_expired(self.store, self.run, self.rest)

    @contextmanager
    def _alone(self, duty: str) -> Iterator[bool]:
        """Yield whether a duty is free, and hold it: each duty has one caller at a time, but several duties may run at once."""
        if duty in self._at_work:
            yield False
            return
        self._at_work.add(duty)
        try:
            yield True
        finally:
            self._at_work.discard(duty)

    def write_document(self) -> None:
        self.document_tried += 1
        write_document(self.disk, DOCUMENT, {"version": self.document_tried})
        self.document = self.document_tried

    def read(self) -> None:
        """Check that readers of some partition see what was put."""
        key = self.rng.choice(KEYS)
        self.read_partition(key)
        self.model.check_found(self.store, key, self.rng)

    def read_partition(self, key: TopicPartition) -> None:
        """Check that readers of a partition see what was put: a few messages from a random one on."""
        queue = self.store.queue(*key)
        first, _ = self.store.first(queue, read_here)
        if first < queue.readable:
            start = self.rng.randrange(first, queue.readable)
            found = islice(self.store.records(queue, start, 300, read_here), 5)
            for ordinal, stored in enumerate(found, start):
                sent = self.model.tracks[key].sent[ordinal]
                expect((stored is None) == (sent is None), "readable", key, ordinal)
                if stored is not None and sent is not None:
                    compare(queue, ordinal, sent, stored, self.store.epoch << 47)

    def close(self) -> None:
        """An orderly stop, perhaps in the middle of a duty."""
        self._give_up_a_duty()
        covered = self.model.before_sync()
        self.store.close()
        self.model.synced(covered)

    def change_role(self) -> None:
        """A slave is to be master: close without waiting for the disk, perhaps in the middle of a duty, and open anew."""
        self._give_up_a_duty()
        self.store.close(durably=False)
        self.model.ended(power=False)
        self.open()

    def _give_up_a_duty(self) -> None:
        """Perhaps."""
        self._give_up = self.rng.random() < 0.3
        if self._give_up:
            try:
                self.rng.choice((self.checkpoint, self.delete_expired, self.prepare))()
            except GivenUp:
                pass
            finally:
                self._give_up = False

    def expect_verified(self) -> None:
        """Offline verification finds nothing: neither a stop nor a killed process damages anything.

        What a power cut has torn is in its eyes damaged until a recovery has listed it.
        """
        if self._recovered and self.disk.list_directory(DATA / LOG):
            report = verify(DATA, self.disk)
            expect(not report.damages, "nothing is damaged", *report.damages)

    def repair(self) -> None:
        """Rebuild what is derived, which changes nothing that readers see."""
        report = repair(DATA, self.disk)
        expect(not report.damages, "nothing is damaged after a repair", *report.damages)

    def check_readable(self) -> None:
        """Readers see no message that is not as durable as was promised."""
        for key, track in self.model.tracks.items():
            readable = self.store.queue(*key).readable
            durable = track.appended if self.settings.durability is Durability.MEMORY else track.synced
            expect(readable <= durable, "readers see only what is durable", key, readable, durable)

    # -- random work --------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], T]) -> T:
        """A wait for the disk, during which other work goes on."""
        if self._give_up and self.rng.random() < 0.3:
            raise GivenUp
        if not self.interleaved or self._depth == 2 or self.rng.random() < 0.7:
            return run_here(call)
        self._depth += 1
        try:
            before = self.rng.random() < 0.5
            if before:
                self._meanwhile()
            result = call()
            if not before:
                self._meanwhile()
            return result
        finally:
            self._depth -= 1

    def rest(self) -> None:
        """A pause of a sweep or a checkpoint, during which other work goes on."""
        self.run(lambda: None)

    def _meanwhile(self) -> None:
        duties = (self.put, self.sync, self.sweep, self.index_keys, self.prepare, self.checkpoint, self.delete_expired)
        for work in self.rng.choices(duties, (12, 4, 4, 4, 2, 2, 1), k=2):
            with suppress(DiskFull):
                work()

    def step(self) -> None:
        """Some operation."""
        operations = (
            self.put, self.sync, self.sweep, self.index_keys, self.checkpoint, self.prepare, self.delete_expired,
            self.write_document, self.read,
        )  # fmt: skip
        self.rng.choices(operations, (40, 16, 12, 12, 8, 3, 2, 3, 8))[0]()
