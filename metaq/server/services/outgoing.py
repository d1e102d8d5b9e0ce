"""Messages that users publish, as they are sent: what their fields become in a request."""

from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from metaq.client.connecting.identity import UniqueIds
from metaq.client.message import message_properties
from metaq.client.sending.sending import send_fields
from metaq.engine.context import Context
from metaq.errors import BadRequest
from metaq.protocol.properties import DEDUPE_ID, PRIORITY, SHARDING_KEY, TIMER_DELAY, TIMER_DELIVER, UNIQUE_KEY
from metaq.protocol.record import java_hash

PRODUCER: Final = "metaq_rest"
"""The producer group under which messages are sent."""
MOST_TOPICS: Final = 10_000
"""Topics whose turn is known; then the first one begins again."""
_ids: Final = UniqueIds("127.0.0.1")


class PreparedSend(NamedTuple):
    """A message as it is sent: the id that it gets, and the fields and the body of the request that sends it."""

    id: str
    fields: dict[str, str]
    body: bytes


class Rotation:
    """The partitions of topics, each in turn."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def next(self, topic: str, partitions: int) -> int:
        """Return the number of the next partition of so many that a topic has."""
        turn = self._turns.get(topic)
        if turn is None:
            turn = 0
            if len(self._turns) >= MOST_TOPICS:
                del self._turns[next(iter(self._turns))]
        self._turns[topic] = turn + 1
        return turn % partitions

    def turn(self, topic: str) -> int:
        """Return how many messages of a topic have had a turn so far."""
        return self._turns.get(topic, 0)

    def go_back(self, topic: str, turn: int) -> None:
        """Take back the turns of messages that are sent another way."""
        if topic in self._turns:
            self._turns[topic] = turn


ROTATION: Final = Rotation()


def outgoing(context: Context, topic: str, message: Any) -> PreparedSend:
    """Return a ``MessageInput`` as it is sent. Raise ``BadRequest``."""
    delay_ms, deliver_at_ms, priority = message.delay_ms, message.deliver_at_ms, message.priority
    if delay_ms is not None and deliver_at_ms is not None:
        raise BadRequest("a message has a delay_ms or a deliver_at_ms, not both")
    ident = new_id()
    own = {
        SHARDING_KEY: message.ordering_key,
        PRIORITY: None if priority is None else str(priority),
        TIMER_DELAY: None if delay_ms is None else str(delay_ms),
        TIMER_DELIVER: None if deliver_at_ms is None else str(deliver_at_ms),
        DEDUPE_ID: message.id,
    }
    given = {name: value for name, value in own.items() if value}
    properties = message_properties(ident, message.tag, message.keys, message.properties, given)
    fields = send_fields(PRODUCER, topic, _text_of(properties))
    fields["e"] = str(_partition(context, topic, message))
    return PreparedSend(ident, fields, body_bytes(message.body, message.body_base64))


def sent_again(topic: str, body: bytes, properties: Mapping[str, str], sys_flag: int, flag: int) -> PreparedSend:
    """Return a stored message as it is sent to the first partition of a topic with these properties."""
    fields = send_fields(PRODUCER, topic, _text_of(properties), sys_flag, flag)
    fields["e"] = "0"
    return PreparedSend(properties[UNIQUE_KEY], fields, body)


def new_id() -> str:
    """Return an id that no other message has."""
    return _ids.next()


def body_bytes(text: str, encoded: str | None) -> bytes:
    """Return the bytes of a body that is given as text, or in base64. Raise ``BadRequest``."""
    if encoded is None:
        return text.encode()
    if text:
        raise BadRequest("a message has a body or a body_base64, not both")
    try:
        return b64decode(encoded, validate=True)
    except (NotBase64, ValueError) as error:
        raise BadRequest(f"body_base64 is not base64: {error}") from error


def _text_of(properties: Mapping[str, str]) -> str:
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])


def _partition(context: Context, topic: str, message: Any) -> int:
    number: int | None = message.partition
    if number is not None:
        return number
    known = context.topics.get(topic)
    partitions = 0 if known is None else known.partitions
    if not partitions:
        return 0
    if message.ordering_key is not None:
        return abs(java_hash(message.ordering_key)) % partitions
    return ROTATION.next(topic, partitions)
