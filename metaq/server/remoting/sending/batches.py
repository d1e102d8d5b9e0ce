"""The messages of a batch that was sent, with the properties that all of them share, and what they ask for together."""

from collections.abc import Mapping
from typing import Final

from metaq.errors import MessageIllegal
from metaq.protocol import properties
from metaq.protocol.priority import one_level
from metaq.protocol.remoting.sending.batch import BatchColumns, decode_batch, read_batch

NO_BATCH: Final = "a message of a batch can be neither delayed nor transactional nor a request"
MOST_BATCH_PROPERTIES: Final = 1 << 20
"""Characters of properties in a batch, its shared properties counted once per message: they are parsed for each message."""


def columns_of_batch(shared: str, data: bytes) -> BatchColumns:
    """Return the messages of a batch, with ``shared`` among the properties of each. Raise ``MessageIllegal``."""
    kept = properties.as_sent(shared)
    if kept is not None and not kept[0]:
        shared = ""  # only meant for the broker
    flags, bodies, texts = read_batch(data)
    if not bodies:
        raise MessageIllegal("the batch has no messages")
    characters = sum(map(len, texts)) + len(texts) * len(shared)
    if characters > MOST_BATCH_PROPERTIES:
        limit = f"over the limit of {MOST_BATCH_PROPERTIES}"
        raise MessageIllegal(f"the properties of a batch have {characters} characters, {limit}: send several batches")
    return BatchColumns(flags, bodies, [f"{text}\x02{shared}" for text in texts] if shared else texts)


def level_of_batch(partitions: int, partition: int, shared: str, data: bytes) -> int:
    """Return the partition of a batch in a topic with so many levels of priority, when it was sent to another one.

    Raise ``MessageIllegal`` unless its messages have one level.
    """
    common = _deciding(shared)
    several: list[Mapping[str, str]] = [common | _deciding(item.properties) for item in decode_batch(data)]
    return one_level(several, partitions, partition)


def _deciding(text: str) -> dict[str, str]:
    """Return those properties that decide about the partition in a topic with priorities."""
    names = (properties.PRIORITY, properties.SHARDING_KEY)
    return {name: value for name, value in properties.parse(text).items() if name in names}
