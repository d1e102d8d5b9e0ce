"""How far a consumer group has come: kept by the brokers, or by each broadcast consumer in a file of its own."""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Final, Protocol

from metaq.client.core import CONTROL_TIMEOUT_S, Core
from metaq.client.transport import Outcome, Question, refusal, successful
from metaq.errors import BadRequest, ClientError
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.adminbodies import decode_offsets, encode_offsets
from metaq.protocol.codes import Request, Response
from metaq.protocol.headers import Int32, QueryConsumerOffset, QueueOnly, SearchOffset, UpdateConsumerOffset

logger = logging.getLogger(__name__)

OFFSETS_FOLDER: Final = Path.home() / ".metaq_offsets"


class Offsets(Protocol):
    """Where each queue goes on. ``update`` is cheap; ``save`` makes it last."""

    def read(self, queue: MessageQueue, deadline: float) -> QueueOffset | None:
        """What was saved; ``None`` when nothing was."""
        ...

    def update(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Remember an offset, to be saved."""
        ...

    def known(self, queue: MessageQueue) -> QueueOffset | None:
        """What was read or remembered last."""
        ...

    def save(self, *, deadline: float | None = None) -> None:
        """Save what has changed; with a deadline, wait until it is saved. ``ClientError``: what failed is saved next time."""
        ...


class BrokerOffsets:
    """Offsets of a group at the brokers."""

    def __init__(self, core: Core, group: str) -> None:
        self._core = core
        self._group = group
        self._guard = threading.Lock()  # guards what follows
        self._offsets: dict[MessageQueue, QueueOffset] = {}
        self._changed: set[MessageQueue] = set()

    def read(self, queue: MessageQueue, deadline: float) -> QueueOffset | None:
        header = QueryConsumerOffset(self._group, queue.topic, Int32(queue.partition))
        response = self._core.call_any(queue.broker_name, Question.of(Request.QUERY_CONSUMER_OFFSET, header), deadline)
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
        with self._guard:
            changed, self._changed = self._changed, set()
            offsets = {queue: self._offsets[queue] for queue in changed}
        unsaved = dict(offsets)
        try:
            for queue, offset in sorted(offsets.items()):
                self._tell(queue, offset, deadline)
                del unsaved[queue]
        finally:
            with self._guard:
                self._changed |= unsaved.keys()

    def _tell(self, queue: MessageQueue, offset: QueueOffset, deadline: float | None) -> None:
        header = UpdateConsumerOffset(self._group, queue.topic, Int32(queue.partition), offset)
        question = Question.of(Request.UPDATE_CONSUMER_OFFSET, header)
        if deadline is not None:
            self._core.ask_broker(queue.broker_name, question, deadline)
            return

        def told(outcome: Outcome) -> None:
            if isinstance(outcome, ClientError) or outcome.code != Response.SUCCESS:  # one that is master no more refuses
                self._core.look_for_masters()
                with self._guard:
                    self._changed.add(queue)

        try:
            address = self._core.master(queue.broker_name)
            self._core.transport.submit(address, question, time.monotonic() + CONTROL_TIMEOUT_S, told)
        except ClientError:
            self._core.look_for_masters()
            raise


class LocalOffsets:
    """Offsets of one broadcast consumer, in a file that is replaced as a whole."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._guard = threading.Lock()  # guards what follows
        self._changed = False
        self._offsets: dict[MessageQueue, QueueOffset] = {}
        with contextlib.suppress(FileNotFoundError):
            self._offsets = _read_table(file)

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
            if not self._changed:
                return
            content = encode_offsets(self._offsets)
            beside = self._file.with_name(f"{self._file.name}.new")
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with beside.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(self._file)
            except OSError as error:
                raise ClientError(f"cannot save offsets in {self._file}: {error}") from error
            self._changed = False


def _read_table(file: Path) -> dict[MessageQueue, QueueOffset]:
    try:
        return {queue: QueueOffset(offset) for queue, offset in decode_offsets(file.read_bytes()).items()}
    except BadRequest as error:
        raise ClientError(f"{file} holds no offsets ({error}); remove it to begin anew") from error


def offset_of(fields: dict[str, str]) -> QueueOffset:
    """The offset that a response says."""
    try:
        return QueueOffset(int(fields["offset"]))
    except (KeyError, ValueError) as error:
        raise ClientError(f"a broker answered {fields} where an offset is due") from error


class QueueEnds:
    """Where queues begin and end, and what was where at a time."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def begin(self, queue: MessageQueue, deadline: float) -> QueueOffset:
        """The oldest message that is still there, or the end."""
        return self._ask(Request.GET_MIN_OFFSET, QueueOnly(queue.topic, Int32(queue.partition)), queue, deadline)

    def end(self, queue: MessageQueue, deadline: float) -> QueueOffset:
        """The offset that the next message will have."""
        return self._ask(Request.GET_MAX_OFFSET, QueueOnly(queue.topic, Int32(queue.partition)), queue, deadline)

    def at_time(self, queue: MessageQueue, time_ms: int, deadline: float) -> QueueOffset:
        """The first message stored at this time or later; the end when there is none."""
        header = SearchOffset(queue.topic, Int32(queue.partition), time_ms)
        return self._ask(Request.SEARCH_OFFSET_BY_TIMESTAMP, header, queue, deadline)

    def _ask(self, code: Request, header: tuple[object, ...], queue: MessageQueue, deadline: float) -> QueueOffset:
        return offset_of(successful(self._core.call_any(queue.broker_name, Question.of(code, header), deadline)).fields)
