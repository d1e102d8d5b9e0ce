"""Checks that records are intact and belong to their partition, by numpy for many records at once.

Only the CRC-32 takes a call for each record, as no library computes many at once; it costs more than all the rest.
"""

from typing import Final

import numpy as np

from metaq.checksum import crc32
from metaq.message import TopicPartition
from metaq.protocol.record import CHECKSUM_SIZE
from metaq.protocol.remoting.bulk import Bulk
from metaq.spark.reading.columns import SMALLEST_RECORD, UNIT, Numbers, Piece, Records, Truths, gathered, piece_of

_CRC_MASK: Final = np.uint32(0x7FFFFFFF)
_CHECKSUM: Final = np.dtype(
    {
        "names": ["name", "mark", "first_digits", "next_digits", "last_digits", "end"],
        "formats": ["<u8", "u1", "<u4", "<u4", "<u2", "u1"],
        "offsets": [0, 8, 9, 13, 17, 19],
        "itemsize": CHECKSUM_SIZE,
    }
)
"""The property that closes a record: its name, 01, ten digits with the least significant one first, 02."""
_NAME: Final = int.from_bytes(b"__CRC32#", "little")
_DIGITS: Final = np.frombuffer(b"".join((b"%04d" % number)[::-1] for number in range(10_000)), "<u4")
"""Each number below 10,000 as the record has it: four digits, the least significant one first."""


def intact_piece(bulk: Bulk, key: TopicPartition) -> Piece | None:
    """Return the messages of a bulk that the broker did not verify; ``None`` unless every record is the one its unit names."""
    piece, log_offsets = piece_of(bulk), np.frombuffer(bulk.units, UNIT)["log_offset"].astype(np.int64)
    there = np.flatnonzero(piece.sizes)
    sizes = piece.sizes[there]
    if (sizes < SMALLEST_RECORD).any():
        return None
    records = Records(piece.data, piece.starts[there], sizes)
    if not are_of(key, records, piece.first + there, log_offsets[there]).all():
        return None
    if not checksums_match(records.data, records.starts, records.properties_ends).all():
        return None
    return piece._replace(records=records)


def are_of(key: TopicPartition, records: Records, ordinals: Numbers, log_offsets: Numbers) -> Truths:
    """Return for each record whether it is the expected one, as far as that can be seen without its checksum.

    A record that overlaps one before it is not.
    """
    fields = records.fields
    sound = records.are_sound(ordinals)
    sound &= (fields["log_offset"] == log_offsets) & (fields["partition"] == key.partition)
    name = key.topic.encode()
    sound[sound] = np.frombuffer(records.data, np.uint8)[records.body_ends[sound]] == len(name)
    sound[sound] = gathered(records.data, records.body_ends[sound] + 1, np.dtype(f"S{len(name)}")) == name
    rows = np.flatnonzero(sound)
    ends = (records.starts + records.sizes)[rows]
    sound[rows[1:][records.starts[rows[1:]] < np.maximum.accumulate(ends)[:-1]]] = False
    return sound


def checksums_match(data: memoryview, begins: Numbers, ends: Numbers) -> Truths:
    """Return for each record whether its checksum matches the bytes before it.

    ``ends`` is where the checksum properties begin.
    """
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    # not as a list: its numbers would fill new memory before they become an array
    found = np.fromiter((crc32(data[begin:end]) for begin, end in spans), np.uint32, len(begins)) & _CRC_MASK
    rest, last = found // 10_000, found // 100_000_000  # as unsigned numbers a third of what divmod takes
    first, following = found - rest * 10_000, rest - last * 10_000
    stored = gathered(data, ends, _CHECKSUM)
    intact: Truths = (stored["name"] == _NAME) & (stored["mark"] == 1) & (stored["end"] == 2)
    intact &= (stored["first_digits"] == _DIGITS[first]) & (stored["next_digits"] == _DIGITS[following])
    intact &= stored["last_digits"] == _DIGITS[last] & 0xFFFF
    return intact
