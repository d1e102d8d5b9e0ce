"""Messages that follow a local transaction (specs: remoting protocol, sections 3.2.8 and 5.5).

::

    TransactionProducer          broker                                        consumers

    send   half message     →    keeps it, and shows it to nobody
           execute()
           COMMIT           →    makes it a message                       →    get it
           ROLLBACK         →    drops it
           UNKNOWN, nothing →    after a while asks any producer of the group
    check()                 ←
           COMMIT, …        →

The half message is there before the local transaction begins, so the message cannot be lost once that has succeeded; whatever
fails in between is found out by asking.
"""

import enum
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, Self

from metaq.client import checks
from metaq.client.connecting.core import CONTROL_TIMEOUT_S, ROUTES_S, Core
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.connecting.presence import level_of
from metaq.client.connecting.transport import Question
from metaq.client.consuming.records import decode_messages
from metaq.client.message import ReceivedMessage, SendResult, SendStatus, message_properties
from metaq.client.sending.producer import GroupProducer, compose
from metaq.client.sending.sending import BORN, QueueChoice, deliver
from metaq.errors import BadRequest, ClientError, ProtocolError
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.properties import DELAY, KEYS, PRODUCER_GROUP, REPLY_TO, TIMERS, TRANSACTION, UNIQUE_KEY
from metaq.protocol.record import TAGS
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import CheckTransaction, EndTransaction, Int32, decode_header
from metaq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK

logger = logging.getLogger(__name__)

_CHECK_THREADS: Final = 4
_MOST_CHECKS: Final = 2000
"""That wait for a thread. Brokers ask again for what is dropped."""
_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_UNFIT: Final = frozenset({DELAY, REPLY_TO, *TIMERS})


class Outcome(enum.Enum):
    """What became of a local transaction."""

    COMMIT = TRANSACTION_COMMIT
    """It succeeded: deliver the message."""
    ROLLBACK = TRANSACTION_ROLLBACK
    """It failed, or never began: drop the message."""
    UNKNOWN = 0
    """Nobody can tell yet: ask later."""


class HalfMessage(NamedTuple):
    """A message that is not delivered yet."""

    id: str
    """Made by the client, and what consumers see as ``ReceivedMessage.id``; ``execute`` may keep it for ``check`` to find."""
    topic: str
    body: bytes
    tag: str | None
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    """All properties, those of brokers and clients among them."""
    born_ms: int
    """When it was sent, by the sender's clock: tells ``check`` whether the local transaction may still be going on."""

    @classmethod
    def of(cls, message: ReceivedMessage) -> Self:
        """The half message that a broker sends when it asks."""
        return cls(message.id, message.topic, message.body, message.tag, message.keys, message.properties, message.born_ms)


Execute = Callable[[HalfMessage, Any], Outcome]
"""Does the local transaction for a message; gets the argument of ``send``, too. Raising means ``UNKNOWN``."""

Check = Callable[[HalfMessage], Outcome]
"""Finds out what became of the local transaction. Raising means that the broker asks again."""


class TransactionResult(NamedTuple):
    """How a send ended, as far as its producer knows."""

    outcome: Outcome
    """Of the local transaction. The broker has been told, or finds out by asking."""
    sent: SendResult
    """Where the half message is; ``sent.id`` is the id of the message that consumers get."""
    error: Exception | None
    """What the local transaction raised, for an outcome that is ``UNKNOWN`` for that reason."""


class Execution:
    """A half message that is stored, and its local transaction; a context manager around the latter, which takes its errors."""

    def __init__(self, message: HalfMessage, sent: SendResult, ended: Callable[[], None]) -> None:
        self.message = message
        self.sent = sent
        self.is_due = sent.status is SendStatus.SEND_OK
        """False when the half message is less safe than it should be: a transaction that succeeds could lose its message."""
        self.outcome = Outcome.UNKNOWN if self.is_due else Outcome.ROLLBACK
        self.error: Exception | None = None
        self._ended = ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._ended()
        if not isinstance(error, Exception):
            return False
        logger.error("local transaction failed, its outcome is unknown message=%s", self.message.id, exc_info=error)
        self.error = error
        return True

    def decide(self, outcome: Outcome) -> None:
        """What the local transaction has come to."""
        self.outcome = _checked(outcome, "execute")


class TransactionProducer(GroupProducer):
    """Sends messages that follow a local transaction; made by ``Client.transaction_producer``. Threads may share it."""

    def __init__(self, core: Core, questions: "Checks", group: str, execute: Execute, check: Check) -> None:
        checks.group(group)
        checks.function("execute", execute, "does the local transaction")
        checks.function("check", check, "finds out what became of a local transaction")
        self._execute = execute
        self._check = check
        self._questions = questions
        self._choice = QueueChoice(core.routes, core.health)
        self._executing: set[str] = set()
        questions.add(group, self)
        super().__init__(core, group)

    def renew(self) -> None:
        super().renew()
        self._executing.clear()  # those are the parent's to answer for

    def close(self) -> None:
        """Brokers ask others of the group from now on; the client stays open."""
        self._questions.remove(self.group, self)
        super().close()

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] = _NONE,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> TransactionResult:
        """Store a half message, call ``execute`` with it and ``argument``, and tell the broker what that returned.

        When ``execute`` raises, the outcome is ``UNKNOWN`` and the result has the error: an error of ``send`` itself means
        that ``execute`` was not called. It is not called either, and the outcome is ``ROLLBACK``, when the half message is
        stored less safely than it should be (``sent.status``).

        See ``Producer.send`` for the parameters and errors; ``timeout_s`` limits the sending, not ``execute``. A transactional
        message can be neither delayed nor a request, nor part of a batch.
        """
        execution = self.begin(topic, body, tag=tag, keys=keys, properties=properties, timeout_s=timeout_s)
        with execution:
            if execution.is_due:
                execution.decide(self._execute(execution.message, argument))
        return self.end(execution)

    def begin(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] = _NONE,
        timeout_s: float | None = None,
    ) -> Execution:
        """The part of ``send`` before the local transaction. What is begun must be entered, and ended."""
        deadline = self._core.deadline(timeout_s)
        checks.message(body, tag, properties)
        if unfit := _UNFIT & properties.keys():
            raise BadRequest(f"property {min(unfit)}: a transactional message can be neither delayed nor a request")
        if PRODUCER_GROUP in properties:
            raise BadRequest(f"property {PRODUCER_GROUP} is the group of the producer, {self.group}; leave it out")
        pairs = message_properties(self._core.unique_ids.next(), tag, checks.keys(keys), properties)
        pairs |= {TRANSACTION: "true", PRODUCER_GROUP: self.group}
        outgoing = compose(self.group, topic, body, pairs, TRANSACTION_PREPARED)
        words, born_ms = tuple(pairs.get(KEYS, "").split()), int(outgoing.fields[BORN])
        message = HalfMessage(pairs[UNIQUE_KEY], topic, body, pairs.get(TAGS), words, MappingProxyType(pairs), born_ms)
        ended = functools.partial(self._executing.discard, message.id)
        self._executing.add(message.id)  # brokers may ask before they answer
        try:
            return Execution(message, deliver(self._core.transport, self._choice, outgoing, deadline)[0], ended)
        except BaseException:
            ended()
            raise

    def end(self, execution: Execution) -> TransactionResult:
        """The part of ``send`` behind the local transaction. A broker that cannot be told asks."""
        sent = execution.sent
        try:
            place = decode_offset_id(sent.offset_id).log_offset
            numbers = (sent.queue_offset, place, Int32(execution.outcome.value))
            header = EndTransaction(self.group, *numbers, sent.id, transaction_id=sent.id)
            self._tell(self._core.master(sent.queue.broker_name), header)
        except (ClientError, ProtocolError) as error:
            logger.warning(
                "outcome not told, the broker will ask message=%s outcome=%s reason=%s", sent.id, execution.outcome, error
            )
        return TransactionResult(execution.outcome, sent, execution.error)

    def asked(self, address: str, header: CheckTransaction, message: HalfMessage) -> None:
        """Answer a broker. ``ClientError`` when it cannot be told, and what ``check`` raises."""
        if message.id in self._executing:
            logger.debug("not checked, the local transaction goes on message=%s", message.id)
            return
        outcome = _checked(self._check(message), "check")
        numbers = (header.tran_state_table_offset, header.commit_log_offset, Int32(outcome.value))
        self._tell(address, EndTransaction(self.group, *numbers, message.id, True, header.transaction_id))

    def _tell(self, address: str, header: EndTransaction) -> None:
        question = Question.of(Request.END_TRANSACTION, header)
        self._core.transport.tell(address, question, time.monotonic() + CONTROL_TIMEOUT_S)


class Checks:
    """What brokers ask a client about transactions: who answers it, and the threads on which that happens."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._producers: dict[str, TransactionProducer] = {}
        self._meets_brokers = False
        self.renew()
        core.on_check = self._asked
        renewed_in_children(self)

    def renew(self) -> None:
        """Have nothing to check yet, in a child of a fork; its producers are the same."""
        self._workers = ThreadPoolExecutor(_CHECK_THREADS, "metaq-check")
        self._guard = threading.Lock()  # guards the producers, and what follows
        self._pending: set[tuple[str, int]] = set()
        """Address of the broker and number of the half message."""

    def add(self, group: str, producer: TransactionProducer) -> None:
        """All brokers may ask it about its group's transactions from now on. ``ClientError``: the group has one already."""
        with self._guard:
            if group in self._producers:
                raise ClientError(f"this client has a transaction producer of group {group} already; share that one")
            self._producers[group] = producer
            meets, self._meets_brokers = self._meets_brokers, True
        self._core.scheduler.run(self._meet_brokers)
        if not meets:
            self._core.regularly(ROUTES_S, self._meet_brokers)

    def remove(self, group: str, producer: TransactionProducer) -> None:
        """It is asked no more."""
        with self._guard:
            if self._producers.get(group) is producer:
                del self._producers[group]

    def close(self) -> None:
        """Begin no more checks; those that run come to their own end."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _meet_brokers(self) -> None:
        """Make sure that each broker knows this client: it may have to answer for one that died, before it sends anything."""
        try:
            if self._core.routes.meet_brokers(time.monotonic() + CONTROL_TIMEOUT_S):
                self._core.heartbeat()
        except (ClientError, ProtocolError) as error:
            logger.log(level_of(error), "brokers cannot ask this client about transactions yet reason=%s", error)

    def _asked(self, address: str, request: RemotingCommand) -> None:
        """Called on the thread that reads a connection."""
        header = decode_header(CheckTransaction, request.fields)
        key = (address, header.tran_state_table_offset)
        with self._guard:
            if key in self._pending:
                return  # asked again before it was answered
            if len(self._pending) >= _MOST_CHECKS:
                logger.warning("check dropped, the broker will ask again waiting=%s", len(self._pending))
                return
            self._pending.add(key)
        try:
            self._workers.submit(self._check, key, header, request.body)
        except RuntimeError as error:
            logger.debug("check dropped, the client was closed reason=%s", error)

    def _check(self, key: tuple[str, int], header: CheckTransaction, record: bytes) -> None:
        address, number = key
        try:
            (message,) = decode_messages(record, address)
            group = message.properties.get(PRODUCER_GROUP, "")
            with self._guard:
                producer = self._producers.get(group)
            if producer is None:
                logger.info("check ignored, no producer of its group group=%s message=%s", group, message.id)
            else:
                producer.asked(address, header, HalfMessage.of(message))
        except Exception:
            logger.exception("check failed, the broker will ask again address=%s half=%s", address, number)
        finally:
            with self._guard:
                self._pending.discard(key)


def _checked(outcome: Outcome, what: str) -> Outcome:
    if not isinstance(outcome, Outcome):
        raise BadRequest(f"{what} returned {outcome!r}; return Outcome.COMMIT, ROLLBACK or UNKNOWN")
    return outcome
