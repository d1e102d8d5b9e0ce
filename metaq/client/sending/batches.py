"""Batches: several messages to one partition in one request."""

from collections.abc import Iterable, Mapping
from typing import Any

from metaq.client import checks
from metaq.client.connecting.identity import UniqueIds
from metaq.client.message import OutgoingMessage, message_properties, priority_properties, properties_text
from metaq.client.sending.sending import Outgoing, check_size, send_fields
from metaq.protocol.properties import UNIQUE_KEY
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch


def compose_batch(
    group: str, topic: str, messages: Iterable[bytes | OutgoingMessage], unique_ids: UniqueIds
) -> Outgoing | None:
    """Return messages as they are sent together; ``None`` when there are none. ``BadRequest`` says which one is wrong."""
    checks.topic(topic)
    ids: list[str] = []
    items: list[BatchItem] = []
    all_keys: list[str] = []
    for number, message in enumerate(several(messages)):
        unique_id = unique_ids.next()
        ids.append(unique_id)
        if isinstance(message, bytes):
            items.append(BatchItem(0, message, f"{UNIQUE_KEY}\x01{unique_id}\x02"))
        elif isinstance(message, OutgoingMessage):
            text, keys = _described(message, unique_id)
            items.append(BatchItem(0, message.body, text))
            all_keys += keys
        else:
            raise checks.wrong(f"messages[{number}]", message, "bytes, or a metaq.OutgoingMessage")
    if not items:
        return None
    packed = encode_batch(items)
    check_size(packed, f"a batch of {len(items)} messages")
    return outgoing_batch(group, topic, packed, ids, keys=all_keys)


def outgoing_batch(
    group: str, topic: str, packed: bytes, ids: list[str], ordering_key: str | None = None, keys: list[str] | None = None
) -> Outgoing:
    """Return messages that are encoded already (``metaq.protocol.remoting.sending.batch``) as they are sent together."""
    fields = {**send_fields(group, topic, ""), "m": "true"}
    return Outgoing(topic, fields, packed, Request.SEND_BATCH_MESSAGE, ids, ordering_key, keys=tuple(keys or ()))


def _described(message: Any, unique_id: str) -> tuple[str, list[str]]:
    """Return an ``OutgoingMessage``'s properties as a request carries them, and its keys.

    Its fields are of any type before they are checked: compiled code would refuse them itself, without naming them.
    """
    body, tag, given, properties, priority = message
    checks.priority(priority)
    checks.message(body, tag, properties)
    keys = checks.keys(given)
    pairs = message_properties(unique_id, tag, keys, properties, priority_properties(priority))
    return properties_text(pairs), [keys] if isinstance(keys, str) else keys


def with_own_properties(messages: object) -> tuple[list[object], list[dict[str, str]]]:
    """Return the messages of a batch with properties that can be added to, and these properties.

    What is no message stays as it is, to be refused.
    """
    own: list[object] = []
    found: list[dict[str, str]] = []
    for message in several(messages):
        whole = OutgoingMessage(message) if isinstance(message, bytes) else message
        if isinstance(whole, OutgoingMessage) and isinstance(whole.properties, Mapping):
            found.append(dict(whole.properties))
            whole = whole._replace(properties=found[-1])
        own.append(whole)
    return own, found


def several(messages: object) -> Iterable[object]:
    """Return the messages; refuse a single one, which is iterable, too, and would be taken apart."""
    if isinstance(messages, bytes | str | OutgoingMessage | Mapping) or not isinstance(messages, Iterable):
        raise checks.wrong("messages", messages, "several messages, as a list of bytes")
    return messages
