"""The store against a model: any order of operations, ends of the process and faults of the disk.

Hypothesis chooses and shrinks; the crash tests do the same at random and by the thousand. The model and its promises:
`tests/crash/model.py`.
"""

import random
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from metaq.errors import DiskFull
from metaq.message import Durability, TopicPartition
from metaq.store.files.filecache import read_here
from metaq.store.log.retention import RetentionRules
from metaq.store.settings import StoreSettings
from tests.crash.command import expect
from tests.crash.driver import Driver, quiet
from tests.crash.model import KEYS
from tests.support.faultydisk import FaultyDisk, Stopped

MESSAGES: Final = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.binary(max_size=40) | st.sampled_from([bytes(700), bytes(3500)]),
        st.sampled_from([0, 2, -2]),
        st.sampled_from([None, "", "tag"]),
    ),
    min_size=1,
    max_size=4,
)


class StoreMachine(RuleBasedStateMachine):
    """MQ-039, MQ-040: one data folder. The driver's own random choices come from a generator that Hypothesis seeds."""

    @initialize(seed=st.integers(0, 1 << 32), durability=st.sampled_from((Durability.MEMORY, Durability.DISK)))
    def start(self, seed: int, durability: Durability) -> None:
        rng = random.Random(seed)
        rules = RetentionRules(ample_free_bytes=1 << 30, least_free_bytes=1)
        sizes = StoreSettings(
            segment_bytes=4096,
            queue_file_bytes=64,
            index_slots=3,
            index_entries=10,
            hot_bytes=1000,
            open_files=3,
            durability=durability,
            retention=rules,
        )
        self.driver = Driver(rng, FaultyDisk(rng), sizes)
        self.driver.interleaved = False
        self._open()

    def _open(self) -> None:
        with quiet():
            self.driver.open()

    @rule(messages=MESSAGES)
    def put(self, messages: list[tuple[TopicPartition, bytes, int, str | None]]) -> None:
        self.driver.put_messages(messages)

    @rule()
    def sync(self) -> None:
        self.driver.sync()

    @rule()
    def sweep(self) -> None:
        self.driver.sweep()

    @rule()
    def index_keys(self) -> None:
        self.driver.index_keys()

    @rule()
    def checkpoint(self) -> None:
        self.driver.checkpoint()

    @rule()
    def prepare(self) -> None:
        self.driver.prepare()

    @rule()
    def delete_expired(self) -> None:
        self.driver.delete_expired()

    @rule(key=st.sampled_from(KEYS))
    def read(self, key: TopicPartition) -> None:
        self.driver.read_partition(key)
        self.driver.model.check_found(self.driver.store, key, self.driver.rng)

    @rule(key=st.sampled_from(KEYS), back=st.integers(0, 3), inside=st.integers(0, 10_000))
    def locate(self, key: TopicPartition, back: int, inside: int) -> None:
        """Any position within a readable message leads to it."""
        store = self.driver.store
        queue = store.queue(*key)
        first, _ = store.first(queue, read_here)
        ordinal = queue.readable - 1 - back
        sent = self.driver.model.tracks[key].sent[ordinal] if ordinal >= first else None
        if sent is not None:
            answer = store.locate(queue, sent.position + inside % sent.text_size, read_here)
            expect(answer == (ordinal, sent.position), "locate", queue, answer, ordinal)

    @rule(messages=MESSAGES, short=st.booleans())
    def put_on_a_full_disk(self, messages: list[tuple[TopicPartition, bytes, int, str | None]], short: bool) -> None:
        """The next call that needs room fails; then there is room again, which the duties find."""
        disk = self.driver.disk
        disk.full_from, disk.full_for = disk.space_calls + 1, 1
        disk.short_writes, disk.copy_on_write = short, True
        try:
            self.driver.put_messages(messages)
        except DiskFull:
            pass
        else:
            expect(disk.space_calls < disk.full_from, "a full disk is noticed")
        disk.full_from = None
        expect(self.driver.store.failure is None, "a full disk is no failure")
        self.driver.prepare()
        self.driver.sweep()
        expect(self.driver.store.shortage is None, "room is found again", self.driver.store.shortage)

    @rule()
    def stop(self) -> None:
        self.driver.close()
        self.driver.ended(power=False)
        self.driver.expect_verified()
        self._open()

    @rule(power=st.booleans())
    def end(self, power: bool) -> None:
        """Between two operations."""
        self.driver.ended(power=power)
        self._open()

    @rule(power=st.booleans(), calls=st.integers(1, 40), messages=MESSAGES)
    def end_within(self, power: bool, calls: int, messages: list[tuple[TopicPartition, bytes, int, str | None]]) -> None:
        """At some call of a put, a sync, a sweep or a checkpoint, perhaps of the next opening."""
        disk = self.driver.disk
        disk.stop_at = disk.calls + calls
        try:
            self.driver.put_messages(messages)
            self.sync()
            self.sweep()
            self.index_keys()
            self.checkpoint()
            disk.locked = False
            self._open()
        except Stopped:
            self.driver.ended(power=power)
            self._open()
        else:
            disk.stop_at = None

    @invariant()
    def readers_see_only_what_is_durable(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check_readable()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, report_multiple_bugs=False)
