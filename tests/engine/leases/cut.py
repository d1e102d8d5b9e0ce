"""Work with leases up to a power cut or a failed sync, and what must be there afterwards."""

import random
from typing import Final

from metaq.engine.leases.poison import Reason
from metaq.leases.state import ReceiptState
from metaq.message import GroupPartition, TopicPartition
from metaq.store.files.filecache import read_here
from tests.engine.leases.leased import GROUPS, PARTITIONS, TOPIC, LeasedBroker, records_of

STEPS: Final = 60
ROUNDS: Final = 150
ROUNDS_EACH: Final = 8
"""Pops for each message at most: two groups get it twice, or more pops that are of the other group."""
LEASE_MS: Final = 1000
KEYS: Final = ("", "a", "b")


class Cut:
    """The life of a folder up to a power cut, and what must be there afterwards."""

    def __init__(self, seed: int, *, by_key: bool = False) -> None:
        self.rng = random.Random(seed)
        self.by_key = by_key
        self.broker = self._ordered(LeasedBroker())
        self.broker.disk.rng = self.rng
        self.put = 0
        self.synced: set[bytes] = set()
        self.finished: dict[str, set[bytes]] = {group: set() for group in GROUPS}
        """Acks that were asked for: the messages may be done or not."""
        self.acknowledged: set[tuple[str, bytes]] = set()
        """Acks that were answered, by group: no kill undoes them."""
        self._acked: list[tuple[str, bytes]] = []  # in this turn
        self.deliveries: list[tuple[GroupPartition, int, int, bytes]] = []

    def _ordered(self, broker: LeasedBroker) -> LeasedBroker:
        if self.by_key:
            broker.order_by_key()
        return broker

    def work(self) -> None:
        for _ in range(STEPS):
            match self.rng.randrange(8):
                case 0 | 1:
                    for _ in range(self.rng.randrange(1, 5)):
                        self.put += 1
                        key = self.rng.choice(KEYS) if self.by_key else ""
                        self.broker.put(TOPIC, self.rng.randrange(PARTITIONS), b"message %d" % self.put, key=key)
                case 2 | 3:
                    self._pop()
                case 4:
                    self._ack()
                case 5:
                    self.reject()
                case 6:
                    self.broker.advance(self.rng.choice((0.1, 1.0)))
                case _:
                    self._sync()
            if self.rng.random() < 0.5:
                self._end_turn()

    def _end_turn(self) -> None:
        self.broker.end_turn()
        if self.broker.store.failure is None:
            self.acknowledged.update(self._acked)
        self._acked.clear()

    def _sync(self) -> None:
        self._end_turn()
        if self.rng.random() < 0.3:
            self.broker.keeper._take_snapshot()
            self.broker.end_turn()
        self.broker.store.sync()
        if self.rng.random() < 0.3:
            self.broker.store.checkpoint()
        self.synced = {b"message %d" % (number + 1) for number in range(self.put)}

    def _pop(self) -> int:
        group = self.rng.choice(GROUPS)
        request = self.broker.request(group, None, self.rng.randrange(1, 8), LEASE_MS)
        result = self.broker.take(request, self.broker.plan(request))
        assert result is not None
        for part in result.given:
            place = GroupPartition(group, TOPIC, part.partition)
            for record in records_of(part.body):
                self.deliveries.append((place, record.queue_offset, result.pop_ms, bytes(record.body)))
        return len(result.given)

    def _ack(self) -> None:
        for place, ordinal, pop_ms, body in self.deliveries[-self.rng.randrange(1, 6) :]:
            self.finished[place.group].add(body)
            if self.broker.leases.ack(place, pop_ms, ordinal, 1):
                self._acked.append((place.group, body))

    def reject(self) -> None:
        if not self.deliveries:
            return
        place, ordinal, pop_ms, _ = self.rng.choice(self.deliveries)
        if self.broker.leases.receipt_state(place, ordinal, pop_ms) is ReceiptState.LEASED:
            queue = self.broker.store.queues[TopicPartition(TOPIC, place.partition)]
            stored = self.broker.store.reader.record(queue, ordinal, read_here)
            assert stored is not None
            record = bytes(stored.buffer[stored.at : stored.at + stored.size])
            self.broker.leasing.poison.give_up(place, ordinal, record, Reason.REJECTED)

    def cut(self) -> None:
        self.broker = self._ordered(LeasedBroker(self.broker.disk.power_cut(self.rng), self.broker.clock.now_ms()))
        self.deliveries.clear()

    def check(self) -> None:
        """Consume what is left: each message that was synced comes, unless it is finished; dead letters come once."""
        seen = {group: set[bytes]() for group in GROUPS}
        for _ in range(ROUNDS + ROUNDS_EACH * self.put):
            self.broker.advance(10)
            if not any(self.broker.leasing.pops.is_ready(group, TOPIC) for group in GROUPS):
                break
            self._pop()
            self.broker.end_turn()
            self._check_open()
        else:
            raise AssertionError("the groups come to an end")
        for place, _, _, body in self.deliveries:
            seen[place.group].add(body)
        for group in GROUPS:
            dead = [letter.body for letter in self.broker.dead_letters(group)]
            assert len(dead) == len(set(dead)), (group, dead)
            missing = self.synced - seen[group] - set(dead) - self.finished[group]
            assert not missing, (group, missing)

    def _check_open(self) -> None:
        """Check that each open message is open once."""
        for place in self.broker.leases.places():
            state = self.broker.state(place)
            assert state is not None and len(set(state.ordinals())) == state.open, place
