"""The errors of metaq, in one tree.

::

    MetaqError
    ├── ConfigError              a setting is unknown, out of range or contradicts another
    ├── DeployFailed             a machine cannot do what a deployment asks of it
    ├── ProtocolError            bytes that are not a valid command or frame
    │   ├── BadRequest           the frame is known, a field of it is wrong; the stream stays in step
    │   │   ├── ReceiptInvalid   a consumer's receipt of a leased message cannot be read
    │   │   └── SubscriptionInvalid  a consumer's tag expression or SQL92 filter cannot be read
    │   ├── StreamLost           the frame boundary is unknown or beyond a limit; the connection closes
    │   └── DecodeError          a message's body is not what its record says: it is delivered as it is stored
    ├── BrokerError              a valid command that the broker refuses
    │   ├── AccessDenied         the principal may not do this to the resource
    │   ├── UnknownTopic         no such topic, and topics are not created on first put
    │   ├── WrongPartition       the topic has fewer partitions
    │   ├── ChecksumMismatch     the body does not have the announced checksum
    │   ├── MessageIllegal       the message itself cannot be kept: too large, or properties that contradict each other
    │   ├── TimerDelivered       a cancel came after the delivery
    │   ├── UnknownTimer         a cancel of a message that is not delayed here
    │   ├── RequestFailed        ends with a remoting code of its own
    │   ├── NotWritable          the broker takes no writes now (disk full, disk failed, stopping)
    │   │   └── NotMaster        this replica only gives messages; another one takes them
    │   └── Overloaded           a limit on work in flight is reached; try again later
    ├── StoreError               the data folder
    │   ├── CorruptRecord        bytes on disk fail their checksum or do not belong where they stand
    │   ├── AgedOut              the messages asked for have been deleted by retention
    │   ├── DiskFull             no room for the next write; nothing of it was kept
    │   ├── DiskFailed           a write or a sync failed; what it covered must be taken as lost
    │   │   ├── ReadFailed       a part of a file cannot be read; nothing else is lost
    │   │   └── TooManyFiles     no file can be opened now; nothing was written, synced or lost
    │   ├── Fenced               another replica may be master by now; nothing of the append was kept
    │   ├── DirectoryLocked      another process uses the folder
    │   ├── IndexFailed          an index of the folder is damaged or cannot be used; it is made anew from the log
    │   ├── WrongBroker          the folder belongs to a broker of another name or number
    │   └── UnknownVersion       the folder was written by a version this one cannot read
    └── ClientError              the Python client library
        ├── ConnectionFailed     cannot connect, or the connection broke
        │   ├── NotConnected     there was no connection to send anything on
        │   └── RegistryUnavailable  ZooKeeper cannot be asked now
        │       └── ChangeUnknown    ... and whether a change was made there is not known
        ├── RequestTimeout       no answer within the deadline; the outcome is unknown
        ├── Refused              the broker answered with an error status
        │   ├── OffsetOutOfRange the message asked for has aged out, or lies beyond the end of its partition
        │   ├── TooLate          the message to cancel was delivered before
        │   ├── UnknownHandle    no message is delayed under the handle to cancel
        │   ├── LeaseLost        the message is not leased by its consumer any more
        │   └── BrokerBusy       a limit on the broker's work in flight is reached; try again after a while
        ├── RouteNotFound        no broker can be asked for a topic; ``reason`` says which of the four causes it is
        ├── SendFailed           every try to send a message failed
        ├── DataLost             messages that had to be read are not there any more
        ├── ClientClosed         the client was closed
        └── PutManyFailed        some of many puts failed (``metaq.client``)

Each class has a ``status`` (the text protocol's HTTP-like code), a ``code`` (the remoting protocol's), ``retriable`` (the same
call may succeed later) and ``closes_connection``.
"""

import enum
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

_KEYS_SHOWN: Final = 8


class MetaqError(Exception):
    """The base class of every error that metaq raises on purpose."""

    status: ClassVar[int] = 500
    code: int = 1
    retriable: bool = False
    closes_connection: ClassVar[bool] = False

    @property
    def told(self) -> str:
        """The text for a person, with the advice that was added to it as notes."""
        return "; ".join([str(self), *self._advice()])

    def _advice(self) -> list[str]:
        return getattr(self, "__notes__", [])


class ConfigError(MetaqError):
    """A setting is unknown, out of range or contradicts another."""


class DeployFailed(MetaqError):
    """A machine cannot do what a deployment asks of it; the text begins with the name of the host."""


class ProtocolError(MetaqError):
    """Bytes that are not a valid command or frame."""

    status = 400


class BadRequest(ProtocolError):
    """A field of a complete frame is wrong; the next frame begins where expected."""


class ReceiptInvalid(BadRequest):
    """The receipt of a leased message cannot be read; remoting answers 13, MESSAGE_ILLEGAL."""

    code = 13


class SubscriptionInvalid(BadRequest):
    """A tag expression or SQL92 filter cannot be read; remoting answers 23, SUBSCRIPTION_PARSE_FAILED."""

    code = 23


class StreamLost(ProtocolError):
    """The end of the frame is unknown or lies beyond a limit."""

    closes_connection = True


class DecodeError(ProtocolError):
    """The body of a message is not what its record says: it cannot be inflated, or does not have its checksum."""


class BrokerError(MetaqError):
    """A valid command that the broker refuses."""


class AccessDenied(BrokerError):
    """The principal may not do this to the resource."""

    status = 403
    code = 16


class UnknownTopic(BrokerError):
    """No such topic, and topics are not created on first put."""

    code = 17


class WrongPartition(BrokerError):
    """The topic has fewer partitions than the number asked for."""


class ChecksumMismatch(BrokerError):
    """The body does not have the checksum that the command announced."""

    retriable = True


class MessageIllegal(BrokerError):
    """The message itself cannot be kept."""

    status = 400
    code = 13


class TimerDelivered(BrokerError):
    """The delayed message was delivered before it could be cancelled."""

    status = 409
    code = 604


class UnknownTimer(BrokerError):
    """No message of this broker is delayed under this handle."""

    status = 404
    code = 604


class RequestFailed(BrokerError):
    """A remoting request that is answered with ``code`` (``metaq.protocol.remoting.codes.Response``)."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class NotWritable(BrokerError):
    """The broker takes no writes now."""

    status = 503
    code = 14
    retriable = True


class NotMaster(NotWritable):
    """Another replica takes messages, or none does until a master is elected."""


class Overloaded(BrokerError):
    """A limit on work in flight is reached; ``retry_after_ms`` is the broker's own estimate."""

    status = 503
    code = 2
    retriable = True

    def __init__(self, reason: str, *, retry_after_ms: int) -> None:
        super().__init__(f"{reason}; retry after {retry_after_ms} ms")
        self.retry_after_ms = retry_after_ms


class StoreError(MetaqError):
    """The base class of errors about the data folder."""


class CorruptRecord(StoreError):
    """Bytes on disk fail their checksum or do not belong where they stand."""


class AgedOut(StoreError):
    """The messages asked for have been deleted from their partition by retention."""

    def __init__(self, topic: str, partition: int, first: int, until: int, *, least: int) -> None:
        super().__init__(
            f"messages {first} to {until - 1} of {topic}-{partition} have aged out; the oldest that is kept is {least}"
        )
        self.least = least
        """The ordinal of the oldest message that is kept."""


class DiskFull(StoreError):
    """No room for the next write; nothing of it was kept."""

    status = 503
    code = 14
    retriable = True


class DiskFailed(StoreError):
    """A write or a sync failed; what it covered must be taken as lost."""

    status = 503
    code = 14


class ReadFailed(DiskFailed):
    """The disk cannot give a part of a file: an unreadable sector; nothing else is lost."""


class TooManyFiles(DiskFailed):
    """No file can be opened now, since the process or the machine has too many open; nothing was written, synced or lost."""

    retriable = True


class Fenced(StoreError):
    """Another replica may be master by now. Nothing of the append was kept."""

    status = 503
    code = 14
    retriable = True


class DirectoryLocked(StoreError):
    """Another process uses the folder."""


class IndexFailed(StoreError):
    """An index that is made from the log is damaged or cannot be used. No message is concerned."""


class WrongBroker(StoreError):
    """The folder belongs to a broker of another name or number."""


class UnknownVersion(StoreError):
    """The folder was written by a version that this one cannot read."""


class SendContext(NamedTuple):
    """The message of a send that failed, or several of a batch, and the last attempt to send it."""

    topic: str
    ids: tuple[str, ...]
    """The ids of the messages; several for a batch."""
    keys: tuple[str, ...]
    """All keys of the messages."""
    attempt: int
    """The number of the last attempt; 0 when none could be made."""
    broker: str
    """The name of the broker of that attempt; empty when none could be made."""

    def __str__(self) -> str:
        first = f"message {self.ids[0]}" if self.ids[0] else "a message without an id"
        more = f" and {len(self.ids) - 1} more" if len(self.ids) > 1 else ""
        keys = f" with the keys {' '.join(self.keys[:_KEYS_SHOWN])}" if self.keys else ""
        last = f"attempt {self.attempt}, at broker {self.broker}" if self.attempt else "no attempt was made"
        return f"while sending {first}{more}{keys} to topic {self.topic}: {last}"


class ClientError(MetaqError):
    """The base class of the client library's errors."""

    context: SendContext | None = None
    """What was being sent, for an error of a send; a note of the error says the same."""

    def _advice(self) -> list[str]:
        return [note for note in super()._advice() if note != str(self.context)]


class ConnectionFailed(ClientError):
    """The connection could not be made, or it broke; a put in flight may or may not be stored."""

    retriable = True


class NotConnected(ConnectionFailed):
    """There was no connection to send on; the request has not left this process."""


class RegistryUnavailable(ConnectionFailed):
    """ZooKeeper cannot be asked now."""


class ChangeUnknown(RegistryUnavailable):
    """The connection to ZooKeeper broke while a change was in flight; the change was made, will be made, or is lost."""


class RequestTimeout(ClientError):
    """No answer within the deadline; a put in flight may or may not be stored."""

    retriable = True


_DETAIL: Final = "failed.Detail:"
"""What the reason follows in answers to puts, which have the form of the original broker's."""


class Refused(ClientError):
    """The broker answered with an error status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the broker refused: {text.rpartition(_DETAIL)[2]}")
        self.code = code
        self.text = text


class OffsetOutOfRange(Refused):
    """A partition has no message at an offset: it has aged out, or lies beyond the end."""

    def __init__(self, code: int, text: str, *, least: int, most: int) -> None:
        super().__init__(code, text)
        self.least = least
        """The offset of the oldest message that is kept."""
        self.most = most
        """The offset after the newest one."""


class TooLate(Refused):
    """The delayed message was delivered before it could be cancelled."""


class UnknownHandle(Refused):
    """No message is delayed under the handle: it was delivered long ago, or the handle is of another broker."""


class LeaseLost(Refused):
    """The message is not leased by this consumer any more; ``text`` says why, for example that it was given again."""


class BrokerBusy(Refused):
    """A limit on the broker's work in flight is reached."""

    retriable = True

    def __init__(self, code: int, text: str, *, retry_after_s: float) -> None:
        super().__init__(code, text)
        self.retry_after_s = retry_after_s
        """The broker's own estimate of when to try again."""


class RouteProblem(enum.Enum):
    """The reason why no broker can be asked for a topic."""

    REGISTRY_UNREACHABLE = "no registry answers"
    TOPIC_ABSENT = "the topic does not exist"
    NO_LIVE_MASTER = "the topic exists, but no broker that can serve it is alive"
    NO_PERMISSION = "the topic exists, but its permissions forbid it"


class RouteNotFound(ClientError):
    """No broker can be asked for a topic; or for anything, then ``topic`` is empty."""

    def __init__(self, topic: str, reason: RouteProblem, details: str) -> None:
        what = f"no route for topic {topic}: " if topic else ""
        super().__init__(f"{what}{reason.value}. {details}")
        self.topic = topic
        self.reason = reason
        self.retriable = reason in {RouteProblem.REGISTRY_UNREACHABLE, RouteProblem.NO_LIVE_MASTER}


class SendFailed(ClientError):
    """Every try to send a message failed. It may still be stored on a broker whose connection broke."""

    retriable = True

    def __init__(self, topic: str, attempts: Sequence[tuple[str, ClientError]], tries: int) -> None:
        told = "; ".join(f"{broker}: {error}" for broker, error in attempts)
        last = f", the last {len(attempts)}" if tries > len(attempts) else ""
        super().__init__(f"no broker took the message for topic {topic} in {tries} tries{last}: {told}")
        self.topic = topic
        self.attempts = tuple(attempts)
        """The broker's name and the error of each of the last three tries."""


class DataLost(ClientError):
    """Messages that a read needs are damaged or no longer there; the text names partitions and offsets."""


class ClientClosed(ClientError):
    """The client, or this part of it, was closed."""
