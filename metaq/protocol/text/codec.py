"""The text protocol's commands: the broker's parser, from bytes to commands, and the client's functions that write them.

A frame is a line ended by CR LF, for ``put`` and ``sync`` followed by a body of the announced length (specs: text protocol,
section 1). Tokens are separated by exactly one blank; empty tokens at the end of a line are dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from metaq.checksum import body_crc
from metaq.errors import BadRequest, StreamLost
from metaq.protocol.record import MAX_TOPIC_LENGTH
from metaq.protocol.text.commands import (
    NO_CHECKSUM,
    NO_OPAQUE,
    Auth,
    Cancel,
    Command,
    Create,
    Get,
    Help,
    Invalid,
    Offset,
    Put,
    PutLater,
    Quit,
    Stats,
    Sync,
    Transaction,
    Version,
)

INT32: Final = (-(1 << 31), (1 << 31) - 1)
INT64: Final = (-(1 << 63), (1 << 63) - 1)
OPAQUE: Final = (-(1 << 31), (1 << 32) - 1)
"""Signed in the Java client, unsigned in the C++ client."""

TRANSACTION_TYPES: Final = frozenset(
    ("BEGIN", "END", "PREPARE", "COMMIT_ONE_PHASE", "COMMIT_TWO_PHASE", "ROLLBACK", "RECOVER", "FORGET")
)
WAIT: Final = "wait="
_OPAQUE_AT: Final = {"get": 6, "offset": 5, "stats": 2, "version": 1, "help": 1, "create": 3, "auth": 3, "cancel": 2}
"""Where the opaque stands in commands that may have tokens after it; elsewhere it is the last token."""
_HEADS_KEPT: Final = 1024
_SMALL_CHUNK: Final = 4096
_OPTIONS: Final = ("delay=", "at=")
_KEY_BEGINS: Final = ("T", "X")
"""First letters of transaction keys; a checksum and a flag begin with a digit or a sign."""
_new: Final = tuple.__new__
"""0.1 µs less than a named tuple's own constructor, of the 1.1 that a put takes here."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits for what a peer may send. A longer line ends the connection; a larger body is skipped and refused."""

    max_line_bytes: int = 4096
    max_body_bytes: int = 1024 * 1024 - 20


class PutHead(NamedTuple):
    """The part of a put line that is the same for many messages, parsed once."""

    topic: str
    partition: int
    length: int
    flag: int | None
    """``None`` when the flag is not part of the head but the token after it."""


def integer(token: str, field: str, bounds: tuple[int, int]) -> int:
    """Return a decimal number with optional sign. ``BadRequest`` names the field when it is not one or out of ``bounds``."""
    digits = token[1:] if token[:1] in ("-", "+") else token
    # isdecimal: int() alone would also take "1_0", blanks and digits of other scripts
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 20:
        raise BadRequest(f"{field} {token[:40]!r} is not a decimal number")
    value = int(token)
    if not bounds[0] <= value <= bounds[1]:
        raise BadRequest(f"{field} {token} is not within {bounds[0]} … {bounds[1]}")
    return value


def _opaque(token: str) -> str:
    if not (token.isdecimal() and len(token) < 10):
        integer(token, "opaque", OPAQUE)
    return token


def _fits(token: str, bounds: tuple[int, int]) -> bool:
    """Return whether ``integer`` would accept the token and it has no plus. Most are short and without sign."""
    if token.isdecimal() and len(token) < 10:
        return True
    if token.startswith("+"):
        return False  # as the sixth of seven tokens, one with a plus is a transaction key
    try:
        integer(token, "", bounds)
    except BadRequest:
        return False
    return True


def _opaque_or_default(tokens: list[str]) -> str:
    """Return the opaque to answer a refused line with: the token in its place, or the last; ``NO_OPAQUE`` if it is not one."""
    place = _OPAQUE_AT.get(tokens[0], -1)
    try:
        return _opaque(tokens[place if place < len(tokens) else -1])
    except BadRequest:
        return NO_OPAQUE


def _need(tokens: list[str], least: int, usage: str) -> None:
    if len(tokens) < least:
        raise BadRequest(f"{tokens[0]} needs {usage}")


GET_USAGE: Final = "TOPIC GROUP PARTITION POSITION MAXSIZE [OPAQUE [wait=MS]]"
OFFSET_USAGE: Final = "TOPIC GROUP PARTITION POSITION [OPAQUE]"
PUT_USAGE: Final = "TOPIC PARTITION LENGTH FLAG [CHECKSUM] [TRANSACTION] [delay=MS | at=MS] OPAQUE"


def _read_get(tokens: list[str]) -> Command:
    _need(tokens, 6, GET_USAGE)
    wait_ms = 0
    if len(tokens) > 7 and tokens[7].startswith(WAIT):
        wait_ms = integer(tokens[7][len(WAIT) :], "wait", (0, INT32[1]))
    return Get(
        tokens[1],
        tokens[2],
        integer(tokens[3], "partition", INT32),
        integer(tokens[4], "offset", INT64),
        integer(tokens[5], "maxSize", INT32),
        _opaque(tokens[6]) if len(tokens) > 6 else NO_OPAQUE,
        wait_ms,
    )


def _read_offset(tokens: list[str]) -> Command:
    _need(tokens, 5, OFFSET_USAGE)
    partition = integer(tokens[3], "partition", INT32)
    position = integer(tokens[4], "offset", INT64)
    return Offset(tokens[1], tokens[2], partition, position, _opaque(tokens[5]) if len(tokens) > 5 else NO_OPAQUE)


def _read_stats(tokens: list[str]) -> Command:
    item = tokens[1] if len(tokens) > 1 else ""
    if len(tokens) > 2:
        return Stats(item, _opaque(tokens[2]), item_only=False)
    return Stats(item, NO_OPAQUE, item_only=True)


def _read_version(tokens: list[str]) -> Command:
    return Version(_opaque(tokens[1]) if len(tokens) > 1 else NO_OPAQUE)


def _read_help(tokens: list[str]) -> Command:
    return Help(_opaque(tokens[1]) if len(tokens) > 1 else NO_OPAQUE)


def _read_quit(tokens: list[str]) -> Command:
    return Quit()


def _read_create(tokens: list[str]) -> Command:
    _need(tokens, 3, "TOPIC PARTITIONS [OPAQUE]")
    opaque = _opaque(tokens[3]) if len(tokens) > 3 else NO_OPAQUE
    return Create(tokens[1], integer(tokens[2], "partitions", (1, INT32[1])), opaque)


def _read_auth(tokens: list[str]) -> Command:
    _need(tokens, 3, "USER PASSWORD [OPAQUE]")
    return Auth(tokens[1], tokens[2], _opaque(tokens[3]) if len(tokens) > 3 else NO_OPAQUE)


def _read_cancel(tokens: list[str]) -> Command:
    _need(tokens, 2, "HANDLE [OPAQUE]")
    return Cancel(tokens[1], _opaque(tokens[2]) if len(tokens) > 2 else NO_OPAQUE)


def _read_transaction(tokens: list[str]) -> Command:
    """Parse a transaction command (section 1.7).

    Of six tokens, a fifth made of digits only is the timeout, anything else the qualifier.
    """
    if len(tokens) == 5 and tokens[3] in TRANSACTION_TYPES:  # the most frequent form, at half of the cost
        return _new(Transaction, (tokens[1], tokens[2], tokens[3], 0, "", _opaque(tokens[4])))
    if not 5 <= len(tokens) <= 7:
        raise BadRequest("transaction needs KEY SESSION TYPE [TIMEOUT] [QUALIFIER] OPAQUE")
    key, session, kind = tokens[1:4]
    if kind not in TRANSACTION_TYPES:
        raise BadRequest(f"transaction type {kind[:40]!r} is unknown")
    extra = tokens[4:-1]
    timeout_s, qualifier = 0, ""
    if len(extra) == 2:
        timeout_s, qualifier = integer(extra[0], "timeout", INT32), extra[1]
    elif extra and extra[0].isdecimal():
        timeout_s = integer(extra[0], "timeout", INT32)
    elif extra:
        qualifier = extra[0]
    return Transaction(key, session, kind, timeout_s, qualifier, _opaque(tokens[-1]))


_READERS: Final[dict[str, Callable[[list[str]], Command]]] = {
    "get": _read_get,
    "offset": _read_offset,
    "stats": _read_stats,
    "version": _read_version,
    "help": _read_help,
    "quit": _read_quit,
    "create": _read_create,
    "auth": _read_auth,
    "cancel": _read_cancel,
    "transaction": _read_transaction,
}
_REPLIES: Final = {"result": 2, "value": 1}
"""Where a reply's length stands; a broker that receives replies skips them with their bodies."""


def _is_checksum(token: str) -> bool:
    return token[:1] == "-" or token[:1].isdecimal()


def _read_put(tokens: list[str], body: bytes) -> Put:
    """Parse a put: the number of tokens, and the sixth one's first character, decide what each token is (section 1.5)."""
    if not 5 <= len(tokens) <= 8:
        raise BadRequest(f"put needs {PUT_USAGE}")
    checksum, transaction = NO_CHECKSUM, None
    opaque = _opaque(tokens[-1]) if len(tokens) > 5 else NO_OPAQUE
    if len(tokens) == 8:
        checksum, transaction = integer(tokens[5], "checksum", INT32), tokens[6]
    elif len(tokens) == 7 and _is_checksum(tokens[5]):
        checksum = integer(tokens[5], "checksum", INT32)
    elif len(tokens) == 7:
        transaction = tokens[5]
    partition = integer(tokens[2], "partition", INT32)
    return Put(tokens[1], partition, integer(tokens[4], "flag", INT32), checksum, transaction, opaque, body)


def _read_put_with_options(tokens: list[str], body: bytes) -> Put | PutLater:
    """Parse a put that may have an option between the flag and the opaque."""
    options = [token for token in tokens[5:-1] if token.startswith(_OPTIONS)]
    if not options:
        return _read_put(tokens, body)
    put = _read_put([token for token in tokens if token not in options], body)
    name, _, value = options[0].partition("=")
    if len(options) > 1:
        raise BadRequest("put takes one of delay=MS and at=MS, not both")
    if put.transaction is not None:
        raise BadRequest(f"a put in a transaction cannot have the option {name}=")
    return PutLater(put, integer(value, name, (0, INT64[1])), name == "delay")


def _read_sync(tokens: list[str]) -> Sync:
    if not 7 <= len(tokens) <= 8:
        raise BadRequest("sync needs TOPIC PARTITION LENGTH FLAG ID [CHECKSUM] OPAQUE")
    return Sync(_opaque(tokens[-1]))


class CommandReader:
    """The parser of one connection's bytes into commands, whatever the slices they arrive in.

    It never raises for bad input: that becomes an ``Invalid`` in its place among the commands. After one whose error closes
    the connection, all further input is ignored.
    """

    __slots__ = ("_chunks", "_drain", "_have", "_heads", "_limits", "_lost", "_need")

    def __init__(self, limits: TextLimits, heads: dict[str, PutHead] | None = None) -> None:
        """Start with an empty buffer. ``heads`` is a cache that the readers of one broker may share."""
        self._limits = limits
        self._heads = {} if heads is None else heads
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = 0
        self._drain = 0
        self._lost = False

    @property
    def buffered(self) -> int:
        """The number of bytes held back because their frame is not complete."""
        return self._have

    def receive(self, data: bytes) -> list[Command]:
        """Return the commands that are complete now. ``data`` is what has arrived, and is never empty."""
        if self._drain:
            drained = min(self._drain, len(data))
            self._drain -= drained
            data = data[drained:]
        if self._chunks:
            self._have += len(data)
            if len(data) < _SMALL_CHUNK and len(self._chunks[-1]) < _SMALL_CHUNK:
                data = self._chunks.pop() + data  # an object for every two bytes takes twenty times their size
            self._chunks.append(data)
            if self._have < self._need:
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
        commands: list[Command] = []
        if self._lost:
            return commands
        used = self._parse(data, commands)
        if self._lost or used >= len(data):
            self._have = 0
        else:
            self._chunks.append(data[used:] if used else data)
            self._have = len(data) - used
        return commands

    def _parse(self, data: bytes, commands: list[Command]) -> int:
        """Append the commands that are complete in ``data``; return how many bytes they took. Sets ``_need`` for the rest.

        The fast path: a put whose head is cached is read by its last tokens alone. Other lines go to ``_read_line``.
        """
        at, end = 0, len(data)
        heads, find, max_line = self._heads, data.find, self._limits.max_line_bytes
        while at < end:
            line_end = find(b"\r\n", at)
            if line_end < 0 or line_end - at > max_line:
                self._need = 0
                # a CR whose LF has not arrived does not belong to the line
                if line_end >= 0 or end - at > max_line + 1:
                    self._lose(f"a line is longer than {max_line} bytes (max_line_bytes)", NO_OPAQUE, commands)
                return at
            line = data[at:line_end].decode("latin-1")
            start = line_end + 2
            parts = line.rsplit(" ", 2)
            if (known := heads.get(parts[0])) is not None:
                _, sixth, tail = parts
                # most numbers are short and without sign: to test that first saves a call
                if (tail.isdecimal() and len(tail) < 10) or _fits(tail, OPAQUE):
                    topic, partition, length, flag = known
                    stop = start + length
                    if (sixth.isdecimal() and len(sixth) < 10) or (sixth[0:1] not in _KEY_BEGINS and _fits(sixth, INT32)):
                        if stop > end:
                            self._need = stop - at
                            return at
                        body = data[start:stop]
                        if flag is None:
                            put = _new(Put, (topic, partition, int(sixth), NO_CHECKSUM, None, tail, body))
                        else:
                            put = _new(Put, (topic, partition, flag, int(sixth), None, tail, body))
                        commands.append(put)
                        at = stop
                        continue
                    if flag is not None and sixth[0:1] in _KEY_BEGINS:
                        if stop > end:
                            self._need = stop - at
                            return at
                        commands.append(_new(Put, (topic, partition, flag, NO_CHECKSUM, sixth, tail, data[start:stop])))
                        at = stop
                        continue
            elif len(parts) == 3 and parts[1][0:1] in _KEY_BEGINS:
                stop = self._with_checksum_and_key(parts, data, start, commands)
                if stop > end:
                    self._need = stop - at
                    return at
                if stop:
                    at = stop
                    continue
            used = self._read_line(line, data, start, commands)
            if used < 0:
                self._need = -used - at
                return at
            at = used
            if self._lost:
                return end
        self._need = 0
        return at

    def _with_checksum_and_key(self, parts: list[str], data: bytes, start: int, commands: list[Command]) -> int:
        """Append a put whose checksum stands between a known head and a transaction key.

        The checksum differs from put to put, so the head is looked up without it. Return where the body ends, which may be
        beyond ``data``: then nothing is appended yet. Return 0 for any other line.
        """
        head, _, checksum = parts[0].rpartition(" ")
        known, opaque = self._heads.get(head), parts[2]
        if known is None or not _fits(checksum, INT32):
            return 0
        topic, partition, length, flag = known
        if flag is None or not ((opaque.isdecimal() and len(opaque) < 10) or _fits(opaque, OPAQUE)):
            return 0
        stop = start + length
        if stop <= len(data):
            commands.append(_new(Put, (topic, partition, flag, int(checksum), parts[1], opaque, data[start:stop])))
        return stop

    def _lose(self, reason: str, opaque: str, commands: list[Command]) -> None:
        self._lost = True
        commands.append(Invalid(StreamLost(f"{reason}; the connection is closed"), opaque))

    def _read_line(self, line: str, data: bytes, start: int, commands: list[Command]) -> int:
        """Parse one line whose body, if any, begins at ``start``, and append its command.

        Return where the next frame begins, or minus the end of a body that has not arrived completely.
        """
        stripped = line.rstrip(" ")
        if not stripped:
            return start  # the CR LF that a person types after a body
        tokens = stripped.split(" ")
        word = tokens[0]
        reader = _READERS.get(word)
        if reader is None:
            if word in ("put", "sync"):
                return self._read_body_command(tokens, data, start, commands)
            if word in _REPLIES:
                return self._skip_reply(tokens, data, start, commands)
            unknown = BadRequest(f"unknown command {word[:40]!r}; type help for the list")
            commands.append(Invalid(unknown, _opaque_or_default(tokens)))
            return start
        try:
            commands.append(reader(tokens))
        except BadRequest as error:
            commands.append(Invalid(error, _opaque_or_default(tokens)))
        return start

    def _read_body_command(self, tokens: list[str], data: bytes, start: int, commands: list[Command]) -> int:
        opaque = _opaque_or_default(tokens)
        try:
            _need(tokens, 4, PUT_USAGE)
            length = integer(tokens[3], "length", (0, INT32[1]))
        except BadRequest as error:
            self._lose(str(error), opaque, commands)
            return len(data)
        if length > self._limits.max_body_bytes:
            limit = self._limits.max_body_bytes
            refusal = BadRequest(f"a body of {length} bytes is larger than {limit} (max_body_bytes); it was not stored")
            commands.append(Invalid(refusal, opaque))
            return self._skip(data, start, length)
        stop = start + length
        if stop > len(data):
            return -stop
        try:
            if tokens[0] == "sync":
                commands.append(_read_sync(tokens))
            else:
                put = _read_put_with_options(tokens, data[start:stop])
                commands.append(put)
                if type(put) is Put:
                    self._remember(tokens, put, length)
        except BadRequest as error:
            commands.append(Invalid(error, opaque))
        return stop

    def _remember(self, tokens: list[str], put: Put, length: int) -> None:
        """Keep the head of an ordinary put to a topic with a possible name, so that the next put like it needs no parsing."""
        if len(tokens) < 6 or len(put.topic) > MAX_TOPIC_LENGTH:
            return
        if len(self._heads) >= _HEADS_KEPT:
            self._heads.clear()
        flag = None if len(tokens) == 6 else put.flag
        self._heads[" ".join(tokens[: 4 if flag is None else 5])] = PutHead(put.topic, put.partition, length, flag)

    def _skip_reply(self, tokens: list[str], data: bytes, start: int, commands: list[Command]) -> int:
        try:
            _need(tokens, _REPLIES[tokens[0]] + 2, "a length and an opaque")
            length = integer(tokens[_REPLIES[tokens[0]]], "length", (0, INT32[1]))
        except BadRequest as error:
            self._lose(str(error), _opaque_or_default(tokens), commands)
            return len(data)
        return self._skip(data, start, length)

    def _skip(self, data: bytes, start: int, length: int) -> int:
        stop = start + length
        self._drain = max(0, stop - len(data))
        return min(stop, len(data))


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
