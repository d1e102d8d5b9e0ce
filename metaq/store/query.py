"""Finding messages by key: the candidates of the key index, compared with the records themselves."""

from typing import Final

from metaq.protocol.keys import keys_of
from metaq.protocol.record import decode_record
from metaq.protocol.text.messages import Stored
from metaq.store.files.disk import File
from metaq.store.files.filecache import ColdRead, Read, read_cached
from metaq.store.index.indexing import Indexing
from metaq.store.reading import Reader

MOST_FOUND: Final = 64
"""Messages in the answer to one query, however many were asked for."""
MOST_BYTES: Final = 4 << 20
"""Bytes of the messages in one answer, unless the first one alone is larger: clients accept no frame of more than 16 MiB."""
READS_AT_ONCE: Final = 1000
"""Reads of a query that may not wait, about 5 ms. One that needs more, because its key is common, lets others go on."""


def query(
    indexing: Indexing, reader: Reader, topic: str, key: str, begin_ms: int, end_ms: int, most: int, read: Read
) -> list[Stored]:
    """Return the messages of a topic that have a key; see ``MessageStore.query``."""
    indexing.catch_up(read)
    if read is read_cached:
        read = _few_reads()
    found: dict[int, Stored] = {}
    found_bytes = 0
    for log_offset in indexing.find(topic, key, begin_ms, end_ms, read):
        if len(found) >= min(most, MOST_FOUND):
            break
        stored = reader.at_offset(log_offset, read) if log_offset not in found else None
        if stored is not None:
            record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
            keys = keys_of(record.topic, record.sys_flag, record.properties)
            if record.topic == topic and key in keys and begin_ms <= record.store_ms <= end_ms:
                found_bytes += stored.size
                if found and found_bytes > MOST_BYTES:
                    break
                found[log_offset] = stored
    return list(found.values())


def _few_reads() -> Read:
    """Return a ``read_cached`` that raises ``ColdRead`` after ``READS_AT_ONCE`` reads."""
    left = READS_AT_ONCE

    def read(file: File, size: int, offset: int) -> bytes:
        nonlocal left
        left -= 1
        if left < 0:
            raise ColdRead
        return read_cached(file, size, offset)

    return read
