"""The commands of the text protocol, independent of how they are written.

``opaque`` is always the client's own token, kept as text and echoed unchanged.
"""

from typing import Final, NamedTuple

from metaq.errors import ProtocolError
from metaq.protocol.text.ids import MessageId

NO_OPAQUE: Final = "2147483647"
"""Stands for an opaque that was left out or could not be read (specs: text protocol, section 1.3)."""

BROKER_CHOOSES: Final = -1
"""The partition number of a put that leaves the choice to the broker."""

NO_KEY: Final = "null"
"""The key in RECOVER, which needs none."""
NO_CHECKSUM: Final = -1
"""The checksum of a put whose body is not to be verified."""

END_OF_LOG: Final = (1 << 63) - 1
"""The position of a get that asks where the partition ends."""


class Put(NamedTuple):
    """Store one message. ``transaction`` is the key of the branch it belongs to, or ``None``."""

    topic: str
    partition: int
    flag: int
    checksum: int
    transaction: str | None
    opaque: str
    body: bytes


class Due(NamedTuple):
    """The time at which a message is to be delivered."""

    time_ms: int
    is_delay: bool
    """True when ``time_ms`` counts from now, false when it is a Unix time."""


class PutOptions(NamedTuple):
    """Options of a put; ``None`` for one that it does not have."""

    due: Due | None = None
    priority: int | None = None
    id: str | None = None
    """The producer's id of the message, by which a repeated put is known."""
    key: str | None = None
    """Messages with the same key are kept in order."""


NO_OPTIONS: Final = PutOptions()


class PutWith(NamedTuple):
    """Store one message with options."""

    put: Put
    options: PutOptions

    @property
    def opaque(self) -> str:
        """That of the put."""
        return self.put.opaque


class Cancel(NamedTuple):
    """Cancel a delayed message."""

    handle: str
    opaque: str


class Get(NamedTuple):
    """Read messages of a partition from a text position on; ``wait_ms`` > 0 lets the broker wait that long for one."""

    topic: str
    group: str
    partition: int
    position: int
    max_size: int
    opaque: str
    wait_ms: int


class Offset(NamedTuple):
    """Ask for the valid position nearest to ``position``."""

    topic: str
    group: str
    partition: int
    position: int
    opaque: str


class Stats(NamedTuple):
    """Ask for statistics. ``item_only``: the line had no opaque, so a number in place of the item may be one."""

    item: str
    opaque: str
    item_only: bool


class Version(NamedTuple):
    """Ask for the version; also the heartbeat of Java clients."""

    opaque: str


class Help(NamedTuple):
    """Ask for the list of commands."""

    opaque: str


class Quit(NamedTuple):
    """Close the connection after the replies that are still due."""


class Create(NamedTuple):
    """Create a topic, or give an existing one more partitions."""

    topic: str
    partitions: int
    priority: bool
    """True when the partitions are levels of priority."""
    opaque: str


class Subscribe(NamedTuple):
    """Have messages of a topic leased to a group and pushed over this connection, at most ``ready`` of them unfinished."""

    topic: str
    group: str
    ready: int
    invisible_ms: int | None
    from_first: bool | None
    """Where a group without offset begins: at the first message, or behind the last one; ``None`` leaves it to the broker."""
    partition: int | None
    attribute: str | None
    owns: bool
    """True when each partition is to belong to one subscription, false when members share all of them."""
    name: str | None
    """The member's name, by which partitions are dealt."""
    with_crc: bool
    opaque: str


class Unsubscribe(NamedTuple):
    """End a subscription."""

    topic: str
    group: str
    opaque: str


class Ready(NamedTuple):
    """Change how many messages may be out; without ``topic`` and ``group`` the connection has one subscription."""

    ready: int
    topic: str | None
    group: str | None
    opaque: str


class Pop(NamedTuple):
    """Lease up to ``most`` messages to a group, and wait up to ``wait_ms`` for the first."""

    topic: str
    group: str
    most: int
    invisible_ms: int | None
    wait_ms: int
    from_first: bool | None
    attribute: str | None
    opaque: str


class Ack(NamedTuple):
    """Finish leased messages. Without ``topic`` and ``group`` they are those of this connection's subscriptions."""

    ids: tuple[MessageId, ...]
    topic: str | None
    group: str | None
    opaque: str


class Nack(NamedTuple):
    """Give leased messages back, to be given again after ``delay_ms``, or to be ``dead`` at once."""

    ids: tuple[MessageId, ...]
    delay_ms: int | None
    dead: bool
    topic: str | None
    group: str | None
    opaque: str


class Extend(NamedTuple):
    """Let leases end ``ms`` milliseconds from now."""

    ids: tuple[MessageId, ...]
    ms: int
    topic: str | None
    group: str | None
    opaque: str


class Auth(NamedTuple):
    """Log in."""

    user: str
    password: str
    opaque: str


class Transaction(NamedTuple):
    """Begin, end or decide a transaction branch: one step, of the kind ``type``."""

    key: str
    session: str
    type: str
    timeout_s: int
    qualifier: str
    opaque: str


class Sync(NamedTuple):
    """Store one message on a slave: a synchronous master's put."""

    opaque: str


class Invalid(NamedTuple):
    """A frame that is not a command. ``error`` says what is wrong; a ``StreamLost`` means that the connection cannot go on."""

    error: ProtocolError
    opaque: str


Command = (
    Put
    | PutWith
    | Cancel
    | Get
    | Offset
    | Stats
    | Version
    | Help
    | Quit
    | Create
    | Subscribe
    | Unsubscribe
    | Ready
    | Pop
    | Ack
    | Nack
    | Extend
    | Auth
    | Transaction
    | Sync
    | Invalid
)
