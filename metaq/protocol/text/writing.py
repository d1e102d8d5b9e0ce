"""Commands as clients write them: the reverse of ``metaq.protocol.text.codec``."""

from metaq.checksum import body_crc
from metaq.protocol.text.lines import WAIT


def write_put(
    topic: str,
    partition: int,
    flag: int,
    body: bytes,
    opaque: int,
    *,
    transaction: str | None = None,
    option: str | None = None,
    old: bool = False,
) -> bytes:
    """Return a put with its checksum, or without one when it is ``old``: the form that brokers before 1.4.4 understand."""
    middle = "" if old else f" {body_crc(body)}"
    word = option if transaction is None else transaction  # a put in a transaction has no options
    more = "" if word is None else f" {word}"
    return f"put {topic} {partition} {len(body)} {flag}{middle}{more} {opaque}\r\n".encode("ascii") + body


def write_get(topic: str, group: str, partition: int, position: int, max_size: int, opaque: int, wait_ms: int = 0) -> bytes:
    """Return a get. ``wait_ms``, how long the broker may hold it, is metaq's own addition, which other brokers ignore."""
    wait = f" {WAIT}{wait_ms}" if wait_ms else ""
    return f"get {topic} {group} {partition} {position} {max_size} {opaque}{wait}\r\n".encode("ascii")


def write_offset(topic: str, group: str, partition: int, position: int, opaque: int) -> bytes:
    """Return an offset command, which asks for the valid position nearest to ``position``."""
    return f"offset {topic} {group} {partition} {position} {opaque}\r\n".encode("ascii")


def write_line(*tokens: str | int) -> bytes:
    """Return any command without a body: its word and tokens, the opaque last."""
    return (" ".join(map(str, tokens)) + "\r\n").encode("ascii")
