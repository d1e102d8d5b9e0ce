"""Commands as clients write them: the reverse of ``metaq.protocol.text.codec``."""

from metaq.checksum import body_crc
from metaq.protocol.text.commands import NO_OPTIONS, Ack, Extend, Nack, Pop, PutOptions, Ready, Subscribe
from metaq.protocol.text.leaselines import DEAD
from metaq.protocol.text.lines import WAIT


def write_put(
    topic: str,
    partition: int,
    flag: int,
    body: bytes,
    opaque: int,
    *,
    transaction: str | None = None,
    options: PutOptions = NO_OPTIONS,
    old: bool = False,
) -> bytes:
    """Return a put with its checksum, or without one when it is ``old``: the form that brokers before 1.4.4 understand."""
    middle = "" if old else f" {body_crc(body)}"
    key = "" if transaction is None else f" {transaction}"
    more = "" if options is NO_OPTIONS else _put_options(options)
    return f"put {topic} {partition} {len(body)} {flag}{middle}{key}{more} {opaque}\r\n".encode() + body


def _put_options(options: PutOptions) -> str:
    due, priority, given_id, key = options
    delay_ms, at_ms = (None, None) if due is None else (due.time_ms, None) if due.is_delay else (None, due.time_ms)
    return _options(delay=delay_ms, at=at_ms, priority=priority, id=given_id, key=key)


def _options(**values: str | int | None) -> str:
    """Return the options that are not ``None``, each behind a blank."""
    return "".join([f" {name}={value}" for name, value in values.items() if value is not None])


def write_get(topic: str, group: str, partition: int, position: int, max_size: int, opaque: int, wait_ms: int = 0) -> bytes:
    """Return a get. ``wait_ms``, how long the broker may hold it, is metaq's own addition, which other brokers ignore."""
    wait = f" {WAIT}{wait_ms}" if wait_ms else ""
    return f"get {topic} {group} {partition} {position} {max_size} {opaque}{wait}\r\n".encode("ascii")


def write_offset(topic: str, group: str, partition: int, position: int, opaque: int) -> bytes:
    """Return an offset command, which asks for the valid position nearest to ``position``."""
    return f"offset {topic} {group} {partition} {position} {opaque}\r\n".encode("ascii")


def write_line(*tokens: str | int) -> bytes:
    """Return any command without a body: its word and tokens, the opaque last."""
    return (" ".join(map(str, tokens)) + "\r\n").encode()


def write_subscribe(command: Subscribe) -> bytes:
    """Return a subscribe as it was read, here and below."""
    options = _options(
        ready=command.ready,
        invisible=command.invisible_ms,
        **{"from": _from(command.from_first)},
        partition=command.partition,
        attribute=command.attribute,
        assign="own" if command.owns else None,
        name=command.name,
        crc="yes" if command.with_crc else None,
    )
    return f"subscribe {command.topic} {command.group}{options} {command.opaque}\r\n".encode()


def write_ready(command: Ready) -> bytes:
    """Return a ready."""
    whose = "" if command.topic is None else f" {command.topic} {command.group}"
    return f"ready {command.ready}{whose} {command.opaque}\r\n".encode()


def write_pop(command: Pop) -> bytes:
    """Return a pop."""
    options = _options(
        invisible=command.invisible_ms,
        wait=command.wait_ms or None,
        **{"from": _from(command.from_first)},
        attribute=command.attribute,
    )
    return f"pop {command.topic} {command.group} {command.most}{options} {command.opaque}\r\n".encode()


def write_ack(command: Ack) -> bytes:
    """Return an ack."""
    return f"ack {_whose(command)} {command.opaque}\r\n".encode()


def write_nack(command: Nack) -> bytes:
    """Return a nack."""
    fate = f" {DEAD}" if command.dead else _options(delay=command.delay_ms)
    return f"nack {_whose(command)}{fate} {command.opaque}\r\n".encode()


def write_extend(command: Extend) -> bytes:
    """Return an extend."""
    return f"extend {_whose(command)} {command.ms} {command.opaque}\r\n".encode()


def _from(from_first: bool | None) -> str | None:
    return None if from_first is None else "first" if from_first else "last"


def _whose(command: Ack | Nack | Extend) -> str:
    ids = ",".join(map(str, command.ids))
    return ids if command.topic is None else f"{command.topic} {command.group} {ids}"
