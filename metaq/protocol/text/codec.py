"""The broker's parser of the text protocol, from bytes to commands.

A frame is a line ended by CR LF, for ``put`` and ``sync`` followed by a body of the announced length (specs: text protocol,
section 1). Tokens are separated by exactly one blank; empty tokens at the end of a line are dropped.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from metaq.errors import BadRequest, StreamLost
from metaq.protocol.record import MAX_TOPIC_LENGTH
from metaq.protocol.text.commands import NO_CHECKSUM, NO_OPAQUE, Command, Invalid, Put
from metaq.protocol.text.lines import PUT_USAGE, READERS, read_put, read_sync
from metaq.protocol.text.tokens import INT32, OPAQUE, fits, integer, need, opaque_or_default

_REPLIES: Final = {"result": 2, "value": 1}
"""Where a reply's length stands; a broker that receives replies skips them with their bodies."""
_HEADS_KEPT: Final = 1024
_SMALL_CHUNK: Final = 4096
_MOST_DIGITS: Final = 9
"""The most digits of a number that is read digit by digit: no such number is beyond 32 bits."""
_ZERO, _BLANK, _CR, _LF = b"0 \r\n"
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


class CommandReader:
    """The parser of one connection's bytes into commands, whatever the slices they arrive in.

    It never raises for bad input: that becomes an ``Invalid`` in its place among the commands. After one whose error closes
    the connection, all further input is ignored.
    """

    __slots__ = ("_chunks", "_drain", "_have", "_head_size", "_heads", "_limits", "_lost", "_need")

    def __init__(self, limits: TextLimits, heads: dict[bytes, PutHead] | None = None) -> None:
        """Start with an empty buffer. ``heads`` is a cache that the readers of one broker may share."""
        self._limits = limits
        self._heads = {} if heads is None else heads
        self._head_size = 0  # of the latest put's head
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
        """Append the commands that are complete in ``data``; return how many bytes they took. Sets ``_need`` for the rest."""
        at, end = 0, len(data)
        find, max_line = data.find, self._limits.max_line_bytes
        while at < end:
            stop = self._like_the_latest(data, at, commands)
            if stop:
                at = stop
                continue
            line_end = find(b"\r\n", at)
            if line_end < 0 or line_end - at > max_line:
                self._need = 0
                # a CR whose LF has not arrived does not belong to the line
                if line_end >= 0 or end - at > max_line + 1:
                    self._lose(f"a line is longer than {max_line} bytes (max_line_bytes)", NO_OPAQUE, commands)
                return at
            line = data[at:line_end].decode("latin-1")
            start = line_end + 2
            used = self._with_known_head(line, data, start, commands) or self._read_line(line, data, start, commands)
            if used < 0:
                self._need = -used - at
                return at
            at = used
            if self._lost:
                return end
        self._need = 0
        return at

    def _like_the_latest(self, data: bytes, at: int, commands: list[Command]) -> int:
        """Append the put at ``at`` if its head is as long as the latest one, and known; return where it ends, or 0.

        This is the way of nearly every put: two short numbers are all that is read of its line. Compiled, their digits cost
        less than to find where the tokens end.
        """
        number_at = at + self._head_size
        known = self._heads.get(data[at:number_at])
        if known is None or number_at + 2 * _MOST_DIGITS + 3 > len(data):
            return 0
        sixth, blank_at = 0, number_at
        while blank_at - number_at < _MOST_DIGITS and 0 <= (digit := data[blank_at] - _ZERO) <= 9:
            sixth = 10 * sixth + digit
            blank_at += 1
        opaque_at = line_end = blank_at + 1
        while line_end - opaque_at < _MOST_DIGITS and 0 <= data[line_end] - _ZERO <= 9:
            line_end += 1
        if blank_at == number_at or data[blank_at] != _BLANK or line_end == opaque_at:
            return 0
        topic, partition, length, flag = known
        start = line_end + 2
        stop = start + length
        is_line = data[line_end] == _CR and data[line_end + 1] == _LF and line_end - at <= self._limits.max_line_bytes
        if not is_line or stop > len(data):
            return 0
        opaque, body = data[opaque_at:line_end].decode("latin-1"), data[start:stop]
        if flag is None:
            commands.append(_new(Put, (topic, partition, sixth, NO_CHECKSUM, None, opaque, body)))
        else:
            commands.append(_new(Put, (topic, partition, flag, sixth, None, opaque, body)))
        return stop

    def _with_known_head(self, line: str, data: bytes, start: int, commands: list[Command]) -> int:
        """Append the put whose line this is and whose body begins at ``start``, if its head is known; return where it ends.

        Return minus that when the body has not arrived completely, and 0 for any other line.
        """
        parts = line.rsplit(" ", 2)
        if len(parts) < 3 or not fits(parts[2], OPAQUE):
            return 0
        rest, sixth, opaque = parts
        key = sixth if sixth[0:1] in _KEY_BEGINS else None
        known = self._known(rest)
        if known is None:
            if key is None:
                return 0
            # a checksum, which differs from put to put, may stand before the transaction key
            rest, _, checksum = rest.rpartition(" ")
            known = self._known(rest)
            if known is None or known.flag is None or not fits(checksum, INT32):
                return 0
            number = int(checksum)
        elif key is not None:
            if known.flag is None:
                return 0
            number = NO_CHECKSUM
        elif fits(sixth, INT32):
            number = int(sixth)
        else:
            return 0
        topic, partition, length, flag = known
        stop = start + length
        if stop > len(data):
            return -stop
        if flag is None:
            flag, number = number, NO_CHECKSUM
        commands.append(_new(Put, (topic, partition, flag, number, key, opaque, data[start:stop])))
        self._head_size = len(rest) + 1
        return stop

    def _known(self, head: str) -> PutHead | None:
        return self._heads.get(f"{head} ".encode("latin-1"))

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
        reader = READERS.get(word)
        if reader is None:
            if word in ("put", "sync"):
                return self._read_body_command(tokens, data, start, commands)
            if word in _REPLIES:
                return self._skip_reply(tokens, data, start, commands)
            unknown = BadRequest(f"unknown command {word[:40]!r}; type help for the list")
            commands.append(Invalid(unknown, opaque_or_default(tokens)))
            return start
        try:
            commands.append(reader(tokens))
        except BadRequest as error:
            commands.append(Invalid(error, opaque_or_default(tokens)))
        return start

    def _read_body_command(self, tokens: list[str], data: bytes, start: int, commands: list[Command]) -> int:
        opaque = opaque_or_default(tokens)
        try:
            need(tokens, 4, PUT_USAGE)
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
                commands.append(read_sync(tokens))
            else:
                put = read_put(tokens, data[start:stop])
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
        head = " ".join([*tokens[: 4 if flag is None else 5], ""]).encode("latin-1")
        self._heads[head] = PutHead(put.topic, put.partition, length, flag)
        self._head_size = len(head)

    def _skip_reply(self, tokens: list[str], data: bytes, start: int, commands: list[Command]) -> int:
        try:
            need(tokens, _REPLIES[tokens[0]] + 2, "a length and an opaque")
            length = integer(tokens[_REPLIES[tokens[0]]], "length", (0, INT32[1]))
        except BadRequest as error:
            self._lose(str(error), opaque_or_default(tokens), commands)
            return len(data)
        return self._skip(data, start, length)

    def _skip(self, data: bytes, start: int, length: int) -> int:
        stop = start + length
        self._drain = max(0, stop - len(data))
        return min(stop, len(data))
