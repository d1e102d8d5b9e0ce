"""Committed offsets of a consumer group: kept by the brokers, or by each broadcast consumer in a file of its own."""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from metaq.client.connecting.core import CONTROL_TIMEOUT_S, LEAST_S, Core
from metaq.client.connecting.transport import Outcome, RemotingRequest, Waiter, refusal, successful
from metaq.errors import BadRequest, ClientError, Refused
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.remoting.adminbodies import decode_offsets, encode_offsets
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, QueryConsumerOffset, QueueOnly, SearchOffset, UpdateConsumerOffset
from metaq.reasons import reason_of

logger = logging.getLogger(__name__)

OFFSETS_FOLDER: Final = Path.home() / ".metaq_offsets"


class Offsets(Protocol):
    """The committed offset of each queue, from ``open`` to ``close``. ``update`` is cheap; ``save`` makes offsets durable."""

    def open(self) -> None:
        """Start using the offsets; ``ClientError`` when they cannot be read, or another consumer uses them."""
        ...

    def read(self, queue: MessageQueue, deadline: float) -> QueueOffset | None:
        """Return the saved offset of a queue; ``None`` when there is none."""
        ...

    def update(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Remember an offset, which the next ``save`` saves."""
        ...

    def known(self, queue: MessageQueue) -> QueueOffset | None:
        """Return the offset that was last read or remembered; ``None`` when there is none."""
        ...

    def save(self, *, deadline: float | None = None) -> None:
        """Save the offsets that have changed; with a deadline, wait until they are saved.

        Raise the first ``ClientError`` when some could not be saved, after all others; the next call tries these again.
        """
        ...

    def forget(self, queue: MessageQueue) -> None:
        """Save the offset of a queue no more: another member continues with it, whose offsets are newer."""
        ...

    def close(self) -> None:
        """Stop using the offsets, so that another consumer may."""
        ...


class BrokerOffsets:
    """The offsets of a group at the brokers. Thread-safe."""

    def __init__(self, core: Core, group: str) -> None:
        self._core = core
        self._group = group
        self._saving = threading.Lock()  # keeps commits in the order in which offsets change
        self._guard = threading.Lock()  # guards what follows
        self._offsets: dict[MessageQueue, QueueOffset] = {}
        self._changed: set[MessageQueue] = set()
        self._unanswered: dict[MessageQueue, Waiter] = {}
        """The queues of which a broker was told an offset that it has not yet answered, with the last such request."""

    def open(self) -> None:
        """Do nothing: the members of a group share the offsets."""

    def close(self) -> None:
        """Do nothing."""

    def read(self, queue: MessageQueue, deadline: float) -> QueueOffset | None:
        header = QueryConsumerOffset(self._group, queue.topic, Int32(queue.partition))
        response = self._core.call_any(queue.broker_name, RemotingRequest.of(Request.QUERY_CONSUMER_OFFSET, header), deadline)
        if response.code == Response.QUERY_NOT_FOUND:
            return None
        if response.code != Response.SUCCESS:
            raise refusal(response)
        offset = offset_of(response.fields)
        with self._guard:
            self._offsets[queue] = offset
        return offset

    def update(self, queue: MessageQueue, offset: QueueOffset) -> None:
        with self._guard:
            if self._offsets.get(queue) != offset:
                self._offsets[queue] = offset
                self._changed.add(queue)

    def known(self, queue: MessageQueue) -> QueueOffset | None:
        with self._guard:
            return self._offsets.get(queue)

    def save(self, *, deadline: float | None = None) -> None:
        with self._saving:
            with self._guard:
                unsaved, self._changed = self._changed, set()
                if deadline is not None:  # what no broker has answered may never reach one
                    unsaved |= self._unanswered.keys() & self._offsets.keys()
                offsets = {queue: self._offsets[queue] for queue in sorted(unsaved)}
            try:
                failures = self._tell_all(offsets, unsaved, deadline)
            finally:
                self._save_again(unsaved)
            if failures:
                raise failures[0]

    def _tell_all(
        self, offsets: dict[MessageQueue, QueueOffset], unsaved: set[MessageQueue], deadline: float | None
    ) -> list[ClientError]:
        """Tell offsets to their brokers, and with a deadline wait for the answers; take what is saved out of ``unsaved``.

        Return the errors. Only the last answer is waited for at once, so that no broker waits for the answer of another one.
        """
        failures: list[ClientError] = []
        silent: set[str] = set()
        told: dict[MessageQueue, Callable[[], object]] = {}
        last = None if deadline is None else next(reversed(offsets), None)
        limit_s = CONTROL_TIMEOUT_S if deadline is None else deadline - time.monotonic()
        for queue, offset in offsets.items():
            if queue.broker_name in silent:
                continue  # another attempt would take the time of the other brokers
            now = time.monotonic()
            until = now + limit_s if deadline is None else max(deadline, now + min(limit_s, LEAST_S))
            try:
                if queue == last:
                    self._core.ask_broker(queue.broker_name, self._update_of(queue, offset), until)
                    with self._guard:
                        self._unanswered.pop(queue, None)
                else:
                    told[queue] = self._tell(queue, offset, until)
            except ClientError as error:
                failures.append(error)
                if not isinstance(error, Refused):
                    silent.add(queue.broker_name)
            else:
                unsaved.discard(queue)
        for queue, answer in told.items() if deadline is not None else ():
            try:
                answer()
            except ClientError as error:
                failures.append(error)
                unsaved.add(queue)
        return failures

    def forget(self, queue: MessageQueue) -> None:
        with self._guard:
            self._offsets.pop(queue, None)
            self._changed.discard(queue)
            self._unanswered.pop(queue, None)

    def _save_again(self, queues: set[MessageQueue]) -> None:
        with self._guard:
            self._changed |= queues & self._offsets.keys()

    def _update_of(self, queue: MessageQueue, offset: QueueOffset) -> RemotingRequest:
        header = UpdateConsumerOffset(self._group, queue.topic, Int32(queue.partition), offset)
        return RemotingRequest.of(Request.UPDATE_CONSUMER_OFFSET, header)

    def _tell(self, queue: MessageQueue, offset: QueueOffset, deadline: float) -> Callable[[], object]:
        """Tell an offset to its broker, and return a function that waits for the answer and raises if it is not saved."""
        waiter = Waiter()

        def answered(outcome: Outcome) -> None:
            has_failed = isinstance(outcome, ClientError) or outcome.code != Response.SUCCESS
            self._answered(queue, waiter, has_failed)
            if has_failed:  # a former master refuses
                self._core.look_for_masters()
            waiter.set(outcome)

        request = self._update_of(queue, offset)
        try:
            address = self._core.master(queue.broker_name)
            with self._guard:
                self._unanswered[queue] = waiter
            self._core.transport.submit(address, request, deadline, answered)
        except ClientError:
            self._answered(queue, waiter, has_failed=True)
            self._core.look_for_masters()
            raise
        return lambda: successful(waiter.wait(deadline, request, address))

    def _answered(self, queue: MessageQueue, waiter: Waiter, has_failed: bool) -> None:
        """Note that a request is answered; one that has failed is told again, unless another one has told a later offset.

        Both at once: a ``save`` meanwhile must not find the offset stored. A queue that is forgotten stays so.
        """
        with self._guard:
            if self._unanswered.get(queue) is waiter:
                del self._unanswered[queue]
                if has_failed and queue in self._offsets:
                    self._changed.add(queue)


class LocalOffsets:
    """The offsets of one broadcast consumer, in a file that is replaced as a whole. Thread-safe.

    A consumer that started from the offsets of another one would miss the messages that only the other one got. So the consumer
    that uses the file locks a second file beside it, until it closes or its process ends.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock: BinaryIO | None = None
        self._guard = threading.Lock()  # guards what follows
        self._changed = False
        self._offsets: dict[MessageQueue, QueueOffset] = {}

    def open(self) -> None:
        self._lock = _locked(self._file)
        try:
            self._offsets = _read_table(self._file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            _locks.discard(lock)
            lock.close()

    def read(self, queue: MessageQueue, deadline: float) -> QueueOffset | None:
        return self.known(queue)

    def update(self, queue: MessageQueue, offset: QueueOffset) -> None:
        with self._guard:
            self._changed = self._changed or self._offsets.get(queue) != offset
            self._offsets[queue] = offset

    def known(self, queue: MessageQueue) -> QueueOffset | None:
        with self._guard:
            return self._offsets.get(queue)

    def save(self, *, deadline: float | None = None) -> None:
        with self._guard:
            if not self._changed or self._lock is None:
                return
            content = encode_offsets(self._offsets)
            beside = self._file.with_name(f"{self._file.name}.new")
            try:
                with beside.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(self._file)
            except OSError as error:
                raise ClientError(f"cannot save offsets in {self._file}: {error}") from error
            self._changed = False

    def forget(self, queue: MessageQueue) -> None:
        """Do nothing: the consumer shares its offsets with nobody."""


_locks: Final[set[BinaryIO]] = set()


def _locked(file: Path) -> BinaryIO:
    """Lock and return the lock file. It is never removed, because another consumer may just have opened it."""
    beside = file.with_name(f"{file.name}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = beside.open("ab")
    except OSError as error:
        raise ClientError(f"cannot keep offsets in {file}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        advice = "give each client on this machine its own name: connect(..., instance='a')"
        raise ClientError(f"another broadcast consumer uses the offsets in {file}; {advice}") from error
    _locks.add(lock)
    return lock


def _leave_locks() -> None:
    """Close the lock files in a child of a fork, so that it does not keep the locks when its parent ends."""
    for lock in _locks:
        lock.close()
    _locks.clear()


os.register_at_fork(after_in_child=_leave_locks)


def _read_table(file: Path) -> dict[MessageQueue, QueueOffset]:
    """Return the offsets in a file, none when there is no file; ``ClientError`` when it cannot be read, or holds others."""
    try:
        return {queue: QueueOffset(offset) for queue, offset in decode_offsets(file.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ClientError(f"cannot read offsets in {file}: {reason_of(error)}; mend or remove it") from error
    except BadRequest as error:
        raise ClientError(f"{file} is not a file of offsets ({error}); remove it to start again") from error


def offset_of(fields: dict[str, str]) -> QueueOffset:
    """Return the offset in the fields of a response; ``ClientError`` when there is none."""
    try:
        return QueueOffset(int(fields["offset"]))
    except (KeyError, ValueError) as error:
        raise ClientError(f"a broker answered {fields} instead of an offset") from error


class QueueEnds:
    """The begin and end offsets of queues, and offsets by time, asked of the brokers."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def begin(self, queue: MessageQueue, deadline: float) -> QueueOffset:
        """Return the offset of the oldest message that is still there, or the end offset."""
        return self._ask(Request.GET_MIN_OFFSET, QueueOnly(queue.topic, Int32(queue.partition)), queue, deadline)

    def end(self, queue: MessageQueue, deadline: float) -> QueueOffset:
        """Return the offset that the next message will have."""
        return self._ask(Request.GET_MAX_OFFSET, QueueOnly(queue.topic, Int32(queue.partition)), queue, deadline)

    def at_time(self, queue: MessageQueue, time_ms: int, deadline: float) -> QueueOffset:
        """Return the offset of the first message stored at ``time_ms`` or later; the end offset when there is none."""
        header = SearchOffset(queue.topic, Int32(queue.partition), time_ms)
        return self._ask(Request.SEARCH_OFFSET_BY_TIMESTAMP, header, queue, deadline)

    def _ask(self, code: Request, header: tuple[object, ...], queue: MessageQueue, deadline: float) -> QueueOffset:
        return offset_of(successful(self._core.call_any(queue.broker_name, RemotingRequest.of(code, header), deadline)).fields)
