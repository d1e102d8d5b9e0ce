"""Finding messages by key: what the key index offers, compared with the records themselves."""

from typing import Final

from metaq.protocol.keys import keys_of
from metaq.protocol.record import decode_record
from metaq.protocol.textmessage import Stored
from metaq.store.files import Read
from metaq.store.indexing import Indexing
from metaq.store.reading import Reader

MOST_FOUND: Final = 64
"""Messages in the answer to one query, whatever was asked for."""


def query(
    indexing: Indexing, reader: Reader, topic: str, key: str, begin_ms: int, end_ms: int, most: int, read: Read
) -> list[Stored]:
    """See ``MessageStore.query``."""
    indexing.catch_up(read)
    found: dict[int, Stored] = {}
    for log_offset in indexing.find(topic, key, begin_ms, end_ms, read):
        if len(found) >= min(most, MOST_FOUND):
            break
        stored = reader.at_offset(log_offset, read) if log_offset not in found else None
        if stored is not None:
            record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
            keys = keys_of(record.topic, record.sys_flag, record.properties)
            if record.topic == topic and key in keys and begin_ms <= record.store_ms <= end_ms:
                found[log_offset] = stored
    return list(found.values())
