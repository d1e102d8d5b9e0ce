"""Leases in memory: the answers to pops, acks and changes. A lease ends when ``advance`` moves the clock to its end."""

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from metaq.client.connecting.transport import ClientAnswer, RemotingRequest
from metaq.errors import RequestFailed
from metaq.leases.events import Acked, Changed, Dead, LeaseEvent, Passed, Popped, Repeated
from metaq.leases.state import PartitionLeases, ReceiptState
from metaq.message import DEAD_PREFIX, GroupPartition
from metaq.protocol import properties as names
from metaq.protocol.record import HEADER
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header
from metaq.protocol.remoting.leases.acks import BatchAckAnswer, decode_batch_ack
from metaq.protocol.remoting.leases.described import PoppedQueue, describe_popped
from metaq.protocol.remoting.leases.pop import (
    AckMessage,
    ChangeAnswer,
    ChangeInvisibleTime,
    PopAnswer,
    PopMessage,
)
from metaq.protocol.remoting.leases.receipts import decode_receipt
from metaq.protocol.subscription import ExpressionKind, parse_subscription
from metaq.testing.log import Letter, Log, Partition, chooser, decode
from metaq.testing.offsets import InMemoryOffsets

MOST_TIMES: Final = 16
"""Deliveries of a message; then it is a dead letter."""
_TOKEN: Final = 1000
_TIMES_FIELD: Final = 12


class _Taken(NamedTuple):
    """The messages of one partition that a pop takes."""

    queue: PoppedQueue
    records: list[bytes]


class ConsumerLeases:
    """The leases of all groups. Not thread-safe."""

    def __init__(self, log: Log, offsets: InMemoryOffsets) -> None:
        """Create it; ``offsets`` are those of the groups, which follow their leases."""
        self._log = log
        self._offsets = offsets
        self._states: dict[GroupPartition, PartitionLeases] = {}
        self._last_pop_ms = 0
        self._last: dict[tuple[str, str], int] = {}
        """The first partition that the last pop of a group got messages from, by group and topic."""

    def reset(self, group: str, topic: str, partition: int) -> None:
        """Forget the leases of a group in a partition, because its offset was set."""
        self._states.pop(GroupPartition(group, topic, partition), None)

    def forget(self, topic: str) -> None:
        """Forget the leases in a topic, because it was deleted."""
        self._states = {place: state for place, state in self._states.items() if place.topic != topic}
        self._last = {key: partition for key, partition in self._last.items() if key[1] != topic}

    def _state(self, place: GroupPartition) -> PartitionLeases:
        state = self._states.get(place)
        if state is None:  # a new group begins with the first message, as that of a young topic does with a broker
            state = self._states[place] = PartitionLeases(self._offsets.get(place) or 0)
        state.settle(self._log.moved_ms)
        return state

    def _apply(self, place: GroupPartition, *events: LeaseEvent) -> None:
        moved_ms, state = self._log.moved_ms, self._state(place)
        for event in events:
            state.apply(event, moved_ms, self._log.now_ms() - moved_ms)
        state.settle(moved_ms)
        self._offsets.lead(place, state.base)

    # -- pops ---------------------------------------------------------------------------------------------------------

    def pop(self, request: RemotingRequest, began_s: float) -> ClientAnswer | None:
        """Return the answer to a pop that has waited since ``began_s``; ``None`` while it goes on waiting."""
        header = decode_header(PopMessage, request.fields or {})
        partitions = self._log.partitions(header.topic)
        if time.monotonic() >= began_s + header.poll_time / 1000 and header.poll_time:
            return self._nothing(header)  # its client does not wait any more
        self._last_pop_ms = max(self._log.now_ms(), self._last_pop_ms + 1)
        taken: list[_Taken] = []
        left = int(header.max_msg_nums)
        for partition in self._order(header, len(partitions)):
            place = GroupPartition(header.consumer_group, header.topic, partition)
            part = self._take(place, partitions[partition], header, left)
            if part.records:
                taken.append(part)
                left -= len(part.records)
        if not taken:
            return None if header.poll_time else self._nothing(header)
        self._last[header.consumer_group, header.topic] = taken[0].queue.queue
        description = describe_popped([part.queue for part in taken])
        answer = PopAnswer(self._last_pop_ms, header.invisible_time, Int32(_TOKEN), 0, *description)
        return ClientAnswer(body=b"".join(b"".join(part.records) for part in taken), fields=encode_header(answer))

    def _order(self, header: PopMessage, count: int) -> Sequence[int]:
        """Return the partitions in the order in which a pop looks at them: the highest first in a topic with priorities."""
        if header.queue_id >= 0:
            return (header.queue_id,)
        if self._log.has_priorities(header.topic):
            return range(count - 1, -1, -1)
        last = self._last.get((header.consumer_group, header.topic), -1)
        return sorted(range(count), key=lambda partition: (partition <= last, partition))

    def _nothing(self, header: PopMessage) -> ClientAnswer:
        fields = encode_header(PopAnswer(self._log.now_ms(), header.invisible_time, Int32(0), 0))
        return ClientAnswer(Response.POLLING_TIMEOUT, remark="there is nothing to pop", fields=fields)

    def _take(self, place: GroupPartition, partition: Partition, header: PopMessage, most: int) -> _Taken:
        state, pop_ms = self._state(place), self._last_pop_ms
        due_ms = pop_ms + header.invisible_time
        again: list[int] = []
        records: list[bytes] = []
        for ordinal in state.first_waiting(most):
            bunch = state.find(ordinal)
            assert bunch is not None
            if bunch.times >= MOST_TIMES:
                self._give_up(place, ordinal, "times")
            else:
                again.append(ordinal)
                records.append(_given_again(partition.record(ordinal), bunch.times))
        if again:
            self._apply(place, Repeated(pop_ms, due_ms, again))
        first = max(state.next, partition.first)
        fresh, following = self._fresh(first, partition, header, most - len(again))
        if fresh:
            bits = sum(1 << ordinal - first for ordinal in fresh)
            self._apply(place, Popped(pop_ms, due_ms, first, following - first, bits))
        elif following > state.next:
            self._apply(place, Passed(following))
        records += [partition.record(ordinal) for ordinal in fresh]
        return _Taken(PoppedQueue(place.partition, [*again, *fresh]), records)

    def _fresh(self, first: int, partition: Partition, header: PopMessage, most: int) -> tuple[list[int], int]:
        """Return the wanted ones of the messages from ``first`` on, and the ordinal after all that were looked at."""
        kind = header.exp_type or ExpressionKind.TAG
        wanted = chooser(parse_subscription(header.topic, header.exp or "*", kind=kind))
        found: list[int] = []
        following = first
        while following < partition.end and len(found) < most:
            if wanted(decode(partition.record(following))):
                found.append(following)
            following += 1
        return found, following

    # -- acks and changes ---------------------------------------------------------------------------------------------

    def ack(self, request: RemotingRequest) -> ClientAnswer:
        """Finish a message."""
        header = decode_header(AckMessage, request.fields or {})
        place, pop_ms = self._place(header)
        if not self._finish(place, pop_ms, header.offset):
            self._demand(place, header.offset, pop_ms, ReceiptState.DONE)
        return ClientAnswer()

    def ack_many(self, request: RemotingRequest) -> ClientAnswer:
        """Finish messages, and answer how many were not finished before."""
        done = 0
        for row in decode_batch_ack(request.body).acks:
            place = GroupPartition(row.group, row.topic, row.queue)
            done += sum(self._finish(place, row.pop_ms, offset) for offset in row.offsets())
        return ClientAnswer(fields=encode_header(BatchAckAnswer(done)))

    def change(self, request: RemotingRequest) -> ClientAnswer:
        """Let a lease end at another time, or make its message a dead letter."""
        header = decode_header(ChangeInvisibleTime, request.fields or {})
        place, pop_ms = self._place(header)
        self._demand(place, header.offset, pop_ms, ReceiptState.LEASED)
        if header.invisible_time < 0:
            self._give_up(place, header.offset, "rejected")
        else:
            self._apply(place, Changed(pop_ms, header.offset, self._log.now_ms() + header.invisible_time))
        return ClientAnswer(fields=encode_header(ChangeAnswer(pop_ms, max(0, header.invisible_time), Int32(_TOKEN))))

    def _place(self, header: AckMessage | ChangeInvisibleTime) -> tuple[GroupPartition, int]:
        receipt = decode_receipt(header.extra_info)
        self._log.partition(header.topic, receipt.queue)  # raises when it was deleted
        return GroupPartition(header.consumer_group, header.topic, receipt.queue), receipt.pop_ms

    def _finish(self, place: GroupPartition, pop_ms: int, ordinal: int) -> bool:
        """Finish a message of a delivery; return whether it was open in it."""
        is_open = self._state(place).receipt_state(ordinal, pop_ms) in {ReceiptState.LEASED, ReceiptState.OVER}
        if is_open:
            self._apply(place, Acked(pop_ms, ordinal, 1))
        return is_open

    def _demand(self, place: GroupPartition, ordinal: int, pop_ms: int, wanted: ReceiptState) -> None:
        state = self._state(place).receipt_state(ordinal, pop_ms)
        if state is not wanted:
            raise RequestFailed(Response.NO_MESSAGE, f"the receipt means nothing any more: the message is {state.value}")

    def _give_up(self, place: GroupPartition, ordinal: int, reason: str) -> None:
        """Move a message to the dead letters of its group."""
        bunch = self._state(place).find(ordinal)
        assert bunch is not None
        message = decode(_given_again(self._log.partition(place.topic, place.partition).record(ordinal), bunch.times))
        pairs = {names.RETRY_TOPIC: message.topic, names.ORIGIN_ID: message.offset_id, **message.properties}
        body, sys_flag = message._packed()
        pairs[names.DEAD] = reason
        topic = f"{DEAD_PREFIX}{place.group}"
        times = message.reconsume_times
        self._log.put(Letter(topic, 0, body, pairs, message.flag, sys_flag, message.born_ms, times))
        self._apply(place, Dead(ordinal))


def _given_again(record: bytes, times: int) -> bytes:
    """Return a record that says how often it was delivered before."""
    head = HEADER.unpack_from(record)
    head = (*head[:_TIMES_FIELD], head[_TIMES_FIELD] + times, *head[_TIMES_FIELD + 1 :])
    return HEADER.pack(*head) + record[HEADER.size :]
