"""Helpers that feed bytes to a reader in slices, and make the record of a stored message."""

import random
import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

from metaq.message import LogOffset
from metaq.protocol.record import (
    CHECKSUM_SIZE,
    HEADER_SIZE,
    MAGIC,
    checksum_property,
    constant_middle,
    host_bytes,
    record_tail,
)
from metaq.protocol.remoting.requests import Received, RequestReader
from metaq.protocol.text.commands import Command, Invalid
from metaq.protocol.text.messages import Stored, encode_stored, plain_overhead

Event = TypeVar("Event")

BORN_MS = 1_400_000_000_000
MIDDLE = constant_middle(0, BORN_MS, host_bytes("10.0.0.9", 40_000), BORN_MS + 1, host_bytes("10.0.0.1", 8123))


def random_slices(data: bytes, seed: int) -> list[bytes]:
    """``data`` cut at random places, most pieces short."""
    chance = random.Random(seed)
    pieces = []
    at = 0
    while at < len(data):
        size = chance.choice((1, 2, 3, chance.randint(1, 20), chance.randint(1, 2000)))
        pieces.append(data[at : at + size])
        at += size
    return pieces


def slicings(data: bytes, seed: int, count: int = 5) -> Iterator[tuple[str, list[bytes]]]:
    """Ways in which ``data`` may arrive, each with a name that says how to get it again."""
    yield "whole", [data] if data else []
    yield "byte by byte", [data[at : at + 1] for at in range(len(data))]
    for number in range(seed, seed + count):
        yield f"random_slices(data, {number})", random_slices(data, number)


def feed(receive: Callable[[bytes], list[Event]], pieces: list[bytes]) -> list[Event]:
    """Everything that a reader makes of the pieces, in order."""
    return [event for piece in pieces for event in receive(piece)]


def feed_until_error(reader: RequestReader, pieces: list[bytes]) -> list[Received]:
    """The requests of the pieces, up to one with which the reader reports an error."""
    found: list[Received] = []
    for piece in pieces:
        found += reader.receive(piece)
        if reader.error is not None:
            break
    return found


def comparable(command: Command) -> object:
    """A command as it is; of an ``Invalid``, whose error equals no other, its kind, text and opaque."""
    if isinstance(command, Invalid):
        return type(command.error), str(command.error), command.opaque
    return command


def stored_record(
    topic: str,
    body: bytes,
    crc: int,
    *,
    flag: int = 0,
    partition: int = 0,
    ordinal: int = 0,
    log_offset: int = 0,
    position: int = 0,
    properties: bytes = b"",
) -> bytes:
    """One record as ``MessageStore.put`` writes it."""
    tail = record_tail(topic, properties)
    size = HEADER_SIZE + len(body) + len(tail) + CHECKSUM_SIZE
    fields = (size, MAGIC, crc, partition, flag, ordinal, log_offset, MIDDLE, position, len(body))
    head = struct.pack(">iiiiiqq40sqi", *fields) + body + tail
    return head + checksum_property(head)


def text_form(topic: str, record: bytes, id_base: int, log_offset: int) -> bytes:
    """The bytes that a text reader gets for one record that begins at ``log_offset``."""
    out: list[bytes | memoryview] = []
    stored = Stored(memoryview(record), 0, len(record), LogOffset(log_offset))
    size = encode_stored(stored, plain_overhead(topic), id_base, out)
    data = b"".join(out)
    assert len(data) == size
    return data
