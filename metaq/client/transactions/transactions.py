"""Transactional messages, which follow a local transaction (specs: remoting protocol, sections 3.2.8 and 5.5).

::

    TransactionProducer          broker                                        consumers

    send   half message     →    keeps it, invisible to consumers
           execute()
           COMMIT           →    makes it a message                       →    get it
           ROLLBACK         →    drops it
           UNKNOWN, nothing →    after a while asks any producer of the group
    check()                 ←
           COMMIT, …        →

The half message is stored before the local transaction begins, so it cannot be lost once the transaction has succeeded. If
anything fails in between, the broker finds out the outcome by asking.
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

from metaq.client import checks, intercepting
from metaq.client.connecting.core import CONTROL_TIMEOUT_S, ROUTES_S, Core
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.connecting.presence import level_of
from metaq.client.connecting.transport import RemotingRequest
from metaq.client.consuming.records import decode_messages
from metaq.client.message import ReceivedMessage, SendResult, SendStatus, message_properties
from metaq.client.sending.groupproducer import GroupProducer
from metaq.client.sending.sending import BORN, QueueChoice, compose, deliver
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
"""The most checks that wait for a thread or run. Further ones are dropped, and brokers ask again."""
_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_UNFIT: Final = frozenset({DELAY, REPLY_TO, *TIMERS})


class Outcome(enum.Enum):
    """The outcome of a local transaction."""

    COMMIT = TRANSACTION_COMMIT
    """It succeeded: deliver the message."""
    ROLLBACK = TRANSACTION_ROLLBACK
    """It failed, or never began: drop the message."""
    UNKNOWN = 0
    """It is not known yet: the broker asks again later."""


class HalfMessage(NamedTuple):
    """A message that is not delivered yet."""

    id: str
    """The id that the client made; consumers see it as ``ReceivedMessage.id``. ``execute`` may store it for ``check``."""
    topic: str
    body: bytes
    tag: str | None
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    """All properties, including those of brokers and clients."""
    born_ms: int
    """The time at which it was sent, by the sender's clock; it tells ``check`` whether the transaction may still be running."""

    @classmethod
    def _of(cls, message: ReceivedMessage) -> Self:
        """Make a half message of the message that a broker sends when it asks."""
        return cls(message.id, message.topic, message.body, message.tag, message.keys, message.properties, message.born_ms)


Execute = Callable[[HalfMessage, Any], Outcome]
"""A function that runs the local transaction for a message; it also takes ``send``'s argument. Raising means ``UNKNOWN``."""

Check = Callable[[HalfMessage], Outcome]
"""A function that finds out the outcome of a local transaction. If it raises, the broker asks again."""


class TransactionResult(NamedTuple):
    """The result of a send, as far as its producer knows it."""

    outcome: Outcome
    """The outcome of the local transaction. The broker has been informed, or finds out by asking."""
    sent: SendResult
    """The place of the half message; ``sent.id`` is the id of the message that consumers get."""
    error: Exception | None
    """The error that the local transaction raised, which made the outcome ``UNKNOWN``; else ``None``."""


class Execution:
    """A stored half message and its local transaction; a context manager around the transaction that catches its errors."""

    def __init__(self, message: HalfMessage, sent: SendResult, ended: Callable[[], None]) -> None:
        self.message = message
        self.sent = sent
        self.is_due = sent.status is SendStatus.SEND_OK
        """False when the half message is less durable than it should be, so that a successful transaction could lose it."""
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
        """Set the outcome of the local transaction; ``BadRequest`` when it is not an ``Outcome``."""
        self.outcome = _checked(outcome, "execute")


class TransactionProducer(GroupProducer):
    """A sender of transactional messages; made by ``Client.transaction_producer``. Threads may share it."""

    def __init__(self, core: Core, broker_checks: "Checks", group: str, execute: Execute, check: Check) -> None:
        checks.group(group)
        check_functions(execute, check)
        self._execute = execute
        self._check = check
        self._checks = broker_checks
        self._choice = QueueChoice(core.routes, core.health)
        self._executing: set[str] = set()
        broker_checks.add(group, self)
        super().__init__(core, group)

    def _renew(self) -> None:
        super()._renew()
        self._executing.clear()  # the parent answers for those

    def close(self) -> None:
        """Leave the group: brokers ask its other producers from now on. The client stays open."""
        self._checks.remove(self.group, self)
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
        """Store a half message, call ``execute`` with it and ``argument``, and report the outcome to the broker.

        When ``execute`` raises, the outcome is ``UNKNOWN`` and the result has the error; errors of ``send`` itself mean that
        ``execute`` was not called. When the half message is stored less durably than it should be (``sent.status``),
        ``execute`` is not called and the outcome is ``ROLLBACK``. A transactional message cannot be delayed, be a request,
        or be part of a batch.

        Args:
            topic: the topic; it need not exist if brokers create topics on first send.
            body: the body; from 4 KiB on it is sent and stored compressed, if that makes it shorter.
            tag: the tag by which consumers can filter.
            keys: keys by which the message can be found; several, or one text with blanks between them.
            properties: further names and values.
            argument: passed on to ``execute``.
            timeout_s: the time limit of the sending, not of ``execute``; by default the client's.

        Returns:
            The outcome, the place of the half message, and the error of ``execute``, if any.

        Raises:
            RouteNotFound: there is nowhere to send it; ``reason`` says why.
            SendFailed: every try failed, each for a reason of its own.
            BrokerBusy: the brokers are overloaded; ``retry_after_s`` says when to try again.
            Refused: a broker does not take it, and others would not either.
            RequestTimeout: no answer in time; it may be stored.
            BadRequest: an argument is invalid.
        """
        execution = self._begin(topic, body, tag=tag, keys=keys, properties=properties, timeout_s=timeout_s)
        with execution:
            if execution.is_due:
                execution.decide(self._execute(execution.message, argument))
        return self._end(execution)

    def _begin(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] = _NONE,
        timeout_s: float | None = None,
    ) -> Execution:
        """Do the part of ``send`` before the local transaction. The execution must be entered, and passed to ``_end``."""
        deadline = self._core.deadline(timeout_s)
        checks.topic(topic)
        checks.message(body, tag, properties)
        if unfit := _UNFIT & properties.keys():
            raise BadRequest(f"property {min(unfit)}: a transactional message can be neither delayed nor a request")
        if PRODUCER_GROUP in properties:
            raise BadRequest(f"property {PRODUCER_GROUP} is the group of the producer, {self.group}; leave it out")
        pairs = message_properties(self._core.unique_ids.next(), tag, checks.keys(keys), properties)
        pairs |= {TRANSACTION: "true", PRODUCER_GROUP: self.group}
        sent = intercepting.sending(self._core.id, self.group, topic, (pairs,))
        ended = functools.partial(self._executing.discard, pairs[UNIQUE_KEY])
        try:
            outgoing = compose(self.group, topic, body, pairs, TRANSACTION_PREPARED)
            words, born_ms = tuple(pairs.get(KEYS, "").split()), int(outgoing.fields[BORN])
            message = HalfMessage(pairs[UNIQUE_KEY], topic, body, pairs.get(TAGS), words, MappingProxyType(pairs), born_ms)
            self._executing.add(message.id)  # brokers may ask before they answer
            results = deliver(self._core.transport, self._choice, outgoing, deadline)
        except BaseException as error:
            ended()
            sent(error)
            raise
        sent(results)
        return Execution(message, results[0], ended)

    def _end(self, execution: Execution) -> TransactionResult:
        """Do the part of ``send`` after the local transaction. If the broker cannot be reached, it will ask."""
        sent = execution.sent
        ended = self._settling(execution.outcome, execution.message)
        failure: Exception | None = None
        try:
            place = decode_offset_id(sent.offset_id).log_offset
            numbers = (sent.queue_offset, place, Int32(execution.outcome.value))
            header = EndTransaction(self.group, *numbers, sent.id, transaction_id=sent.id)
            self._tell(self._core.master(sent.queue.broker_name), header)
        except (ClientError, ProtocolError) as error:
            failure = error
            logger.warning(
                "outcome not told, the broker will ask message=%s outcome=%s reason=%s", sent.id, execution.outcome, error
            )
        ended(failure)
        return TransactionResult(execution.outcome, sent, execution.error)

    def _asked(self, address: str, header: CheckTransaction, message: HalfMessage) -> None:
        """Answer a broker's check. Raise ``ClientError`` when the answer cannot be sent, and whatever ``check`` raises.

        While the local transaction runs here, there is no answer; the broker asks again.
        """
        if message.id in self._executing:
            logger.debug("not checked, the local transaction goes on message=%s", message.id)
            return
        outcome = _checked(self._check(message), "check")
        numbers = (header.tran_state_table_offset, header.commit_log_offset, Int32(outcome.value))
        ended = self._settling(outcome, message)
        try:
            self._tell(address, EndTransaction(self.group, *numbers, message.id, True, header.transaction_id))
        except ClientError as error:
            ended(error)
            raise
        ended(None)

    def _settling(self, outcome: Outcome, message: HalfMessage) -> intercepting.Ended:
        return intercepting.settling(self._core.id, self.group, outcome.name.lower(), message)

    def _tell(self, address: str, header: EndTransaction) -> None:
        request = RemotingRequest.of(Request.END_TRANSACTION, header)
        self._core.transport.tell(address, request, time.monotonic() + CONTROL_TIMEOUT_S)


class Checks:
    """The transaction checks that brokers send to a client: the producers that answer them, and the threads that they use."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._producers: dict[str, TransactionProducer] = {}
        self._meets_brokers = False
        self._renew()
        core.on_check = self._asked
        renewed_in_children(self)

    def _renew(self) -> None:
        """Forget the pending checks in a child of a fork, and keep the producers."""
        self._workers = ThreadPoolExecutor(_CHECK_THREADS, "metaq-check")
        self._guard = threading.Lock()  # guards the producers, and what follows
        self._pending: set[tuple[str, int]] = set()
        """The checks that wait or run: address of the broker, and offset in the half topic."""

    def add(self, group: str, producer: TransactionProducer) -> None:
        """Let a producer answer all brokers' checks about its group; ``ClientError`` when the group has one here already."""
        with self._guard:
            if group in self._producers:
                raise ClientError(f"this client already has a transaction producer of group {group}; share it")
            self._producers[group] = producer
            meets, self._meets_brokers = self._meets_brokers, True
        self._core.scheduler.run(self._meet_brokers)
        if not meets:
            self._core.regularly(ROUTES_S, self._meet_brokers)

    def remove(self, group: str, producer: TransactionProducer) -> None:
        """Send no more checks to a producer."""
        with self._guard:
            if self._producers.get(group) is producer:
                del self._producers[group]

    def close(self) -> None:
        """Start no more checks. Those that run are not interrupted and not waited for."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _meet_brokers(self) -> None:
        """Make sure that each broker knows this client, which may have to answer for a failed one before it sends anything."""
        try:
            if self._core.routes.meet_brokers(time.monotonic() + CONTROL_TIMEOUT_S):
                self._core.heartbeat()
        except (ClientError, ProtocolError) as error:
            logger.log(level_of(error), "brokers cannot ask this client about transactions yet reason=%s", error)

    def _asked(self, address: str, request: RemotingCommand) -> None:
        """Take a check on the thread that reads a connection, and pass it to a worker."""
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
                producer._asked(address, header, HalfMessage._of(message))
        except Exception:
            logger.exception("check failed, the broker will ask again address=%s half=%s", address, number)
        finally:
            with self._guard:
                self._pending.discard(key)


def check_functions(execute: object, check: object) -> None:
    """Refuse what are not the two functions of a transaction producer."""
    checks.function("execute", execute, "does the local transaction")
    checks.function("check", check, "finds out what became of a local transaction")


def _checked(outcome: Outcome, what: str) -> Outcome:
    if not isinstance(outcome, Outcome):
        raise BadRequest(f"{what} returned {outcome!r}; return Outcome.COMMIT, ROLLBACK or UNKNOWN")
    return outcome
