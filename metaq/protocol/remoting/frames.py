"""Frames of the remoting protocol (specs: remoting protocol, section 1).

All integers big-endian and signed::

    at   size       field
    0    4          L: bytes that follow this field
    4    1          serialization of the header: 0 JSON, 1 compact
    5    3          H: length of the header
    8    H          header
    8+H  L - 4 - H  body

A compact header::

    size   field
    2      code
    1      language
    2      version
    4      opaque
    4      flag: bit 0 response, bit 1 one-way
    4 + n  remark
    4 + m  pairs: (2 + n) name, (4 + n) value, repeated
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import orjson
from librt.strings import BytesWriter, read_i32_be, write_i32_be

from metaq.errors import BadRequest, StreamLost
from metaq.protocol.remoting.codes import COMPACT, JSON, LANGUAGES, ONEWAY_FLAG, RESPONSE_FLAG, VERSION

HEAD: Final = struct.Struct(">iI")
HEAD_SIZE: Final = 8
LENGTH_SIZE: Final = 4
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
"""The largest frame that Java clients accept, and this broker too."""
MAX_HEADER_BYTES: Final = 256 * 1024
"""Even a header with the longest properties, each of their bytes escaped, is smaller."""
MOST_FIELDS: Final = 256
"""Fields in one header: ten times as many as any client sends."""

_COMPACT_HEAD: Final = struct.Struct(">hbhiii")  # code, language, version, opaque, flag, length of the remark
_NAME_LENGTH: Final = struct.Struct(">h")
_LENGTH: Final = struct.Struct(">i")
_HEADER_LENGTH: Final = 0xFFFFFF
_SERIALIZATIONS: Final = ("JSON", "ROCKETMQ")
_INT32: Final = range(-(1 << 31), 1 << 31)
_BIAS: Final = 1 << 31
_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""

_BARE_TAIL: Final = f',"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'

assert HEAD.size == HEAD_SIZE

Fields = dict[str, str]


class RemotingCommand(NamedTuple):
    """One frame: a request, or the response to one."""

    code: int
    """A request code or a response code, as ``flag`` says."""
    opaque: int
    """Chosen by the requester and echoed in the response; 32 bits."""
    flag: int
    fields: Fields
    """The typed header, flattened to text."""
    body: bytes
    remark: str | None
    language: str
    version: int
    serialization: int

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)


class FrameCutter:
    """The bytes of a connection, cut into frames.

    Each byte is copied or read only a bounded number of times, whatever the slices that the bytes arrive in.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit = max_frame_bytes
        self._kept = bytearray()
        self._wanted = HEAD_SIZE
        self.error: StreamLost | None = None
        """The reason why nothing after the last frame can be read; ``None`` while the stream is intact."""

    @property
    def waiting(self) -> int:
        """The number of bytes of a frame whose end has not arrived."""
        return len(self._kept)

    def _take(self, data: bytes, start: int, end: int, stop: int, serialization: int) -> None:
        """Take a frame: its header stands from ``start`` to ``end``, its body from there to ``stop``. Raise ``StreamLost``."""
        raise NotImplementedError

    def _cut(self, data: bytes) -> None:
        """Take the frames that ``data`` completes. ``error`` may be set afterwards: then nothing after these can be read."""
        if self._kept:
            self._kept += data
            if len(self._kept) < self._wanted:
                return
            data = bytes(self._kept)
            self._kept = bytearray()
        at, end = 0, len(data)
        self._wanted = HEAD_SIZE
        limit = self._limit
        while end - at >= HEAD_SIZE:
            length: int = read_i32_be(data, at)
            header: int = read_i32_be(data, at + LENGTH_SIZE)
            size, serialization = header & _HEADER_LENGTH, header >> 24 & 0xFF
            if not 4 <= length <= limit or serialization > COMPACT or size > min(length - 4, MAX_HEADER_BYTES):
                self.error = self._wrong(length, serialization, size)
                break
            start = at + HEAD_SIZE
            stop = at + LENGTH_SIZE + length
            if stop > end:
                self._wanted = LENGTH_SIZE + length
                break
            try:
                self._take(data, start, start + size, stop, serialization)
            except StreamLost as error:
                self.error = error
                break
            at = stop
        if at < end and self.error is None:
            self._kept += data[at:]

    def _wrong(self, length: int, serialization: int, size: int) -> StreamLost:
        if not 4 <= length <= self._limit:
            return StreamLost(f"a frame of {length} bytes; between 4 and {self._limit} are allowed")
        if serialization > COMPACT:
            return StreamLost(f"unknown header serialization {serialization}; 0 (JSON) and 1 (compact) are known")
        if size > MAX_HEADER_BYTES:
            return StreamLost(f"a header of {size} bytes; at most {MAX_HEADER_BYTES} are allowed")
        return StreamLost(f"a header of {size} bytes in a frame of {length}")


class FrameReader(FrameCutter):
    """The parser of a connection's bytes into frames."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(max_frame_bytes)
        self._frames: list[RemotingCommand] = []

    def receive(self, data: bytes) -> list[RemotingCommand]:
        """Return the frames that ``data`` completes. ``error`` may be set afterwards: then nothing after these can be read."""
        self._cut(data)
        frames, self._frames = self._frames, []
        return frames

    def _take(self, data: bytes, start: int, end: int, stop: int, serialization: int) -> None:
        self._frames.append(decode_frame(data[start:end], data[end:stop], serialization))


def decode_frame(header: bytes, body: bytes, serialization: int) -> RemotingCommand:
    """Return the frame with this header and body. Raise ``StreamLost`` for a header that cannot be read."""
    return _decode_compact(header, body) if serialization else _decode_json(header, body)


def _decode_json(header: bytes, body: bytes) -> RemotingCommand:
    try:
        content: dict[str, Any] = orjson.loads(header)
        fields: dict[str, Any] = content.get("extFields") or {}
        code: int = content["code"]
        opaque: int = content["opaque"]
        flag: int = content.get("flag", 0)
        version: int = content.get("version", 0)
        remark, language = content.get("remark"), content.get("language")
        if remark is not None and not isinstance(remark, str):
            remark = _as_text(remark)
        for value in fields.values():
            if not isinstance(value, str):
                fields = {name: _as_text(value) for name, value in fields.items() if value is not None}
                break
        # one test for all four: with the bias, a number beyond 32 bits is negative or has higher bits
        in_range = not ((code + _BIAS) | (opaque + _BIAS) | (flag + _BIAS) | (version + _BIAS)) >> 32
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise StreamLost(f"a JSON header that cannot be read: {error}") from error
    if len(fields) > MOST_FIELDS:
        raise _too_many_fields(len(fields))
    if not in_range:
        raise StreamLost(f"a JSON header with a number of more than 32 bits: {code}, {opaque}, {flag} or {version}")
    if type(language) is not str:
        language = _language(language)
    return _new(RemotingCommand, (code, opaque, flag, fields, body, remark, language, version, JSON))


def _too_many_fields(count: int) -> StreamLost:
    return StreamLost(f"a header with {count} fields or more; at most {MOST_FIELDS} are allowed")


def _as_text(value: Any) -> str:
    """Return a value as the string that a Java peer would have sent."""
    if isinstance(value, str):
        return value
    return orjson.dumps(value).decode()


def _language(number: Any) -> str:
    return LANGUAGES[number] if type(number) is int and 0 <= number < len(LANGUAGES) else "OTHER"


def _decode_compact(header: bytes, body: bytes) -> RemotingCommand:
    try:
        code, language, version, opaque, flag, size = _COMPACT_HEAD.unpack_from(header)
        at = _COMPACT_HEAD.size
        remark, at = _text(header, at, size)
        size = _LENGTH.unpack_from(header, at)[0]
        at += 4
        end = at + size
        if size < 0 or end > len(header):
            raise StreamLost(f"a compact header with {size} bytes of fields in {len(header)}")
        fields, count = {}, 0
        while at < end:
            name, at = _text(header, at + 2, _NAME_LENGTH.unpack_from(header, at)[0])
            value, at = _text(header, at + 4, _LENGTH.unpack_from(header, at)[0])
            if value:
                fields[name] = value
            count += 1
            if count > MOST_FIELDS:
                raise _too_many_fields(count)
    except (struct.error, UnicodeDecodeError) as error:
        raise StreamLost(f"a compact header that cannot be read: {error}") from error
    return RemotingCommand(code, opaque, flag, fields, body, remark or None, _language(language), version, COMPACT)


def _text(header: bytes, at: int, size: int) -> tuple[str, int]:
    if size < 0 or at + size > len(header):
        raise StreamLost(f"a compact header whose lengths run past its {len(header)} bytes")
    return header[at : at + size].decode(), at + size


# -- writing ----------------------------------------------------------------------------------------------------------


class Asked(Protocol):
    """The parts of a request that an answer needs."""

    @property
    def opaque(self) -> int: ...

    @property
    def serialization(self) -> int: ...


def frame_head(header_size: int, body_size: int = 0) -> bytes:
    """Return what is before a JSON header: both lengths (``HEAD``)."""
    head = BytesWriter()
    write_i32_be(head, LENGTH_SIZE + header_size + body_size)
    write_i32_be(head, header_size)
    return head.getvalue()


def encode_response(
    request: Asked,
    code: int,
    fields: Mapping[str, str] | None = None,
    remark: str | None = None,
    body_size: int = 0,
) -> bytes:
    """Return the frame that answers ``request``, up to its body, of which ``body_size`` bytes follow."""
    if fields is None and remark is None and request.serialization == JSON:
        return encode_bare(code, request.opaque, body_size)
    return _encode(code, request.opaque, RESPONSE_FLAG, fields, remark, body_size, "JAVA", request.serialization)


def encode_bare(code: int, opaque: int, body_size: int = 0) -> bytes:
    """Return the frame of an answer without fields and remark, in JSON, up to its body, of which ``body_size`` bytes follow."""
    header = f'{{"code":{code},"flag":1,"language":"JAVA","opaque":{opaque}{_BARE_TAIL}'.encode()
    return frame_head(len(header), body_size) + header


def encode_done(opaques: Sequence[int]) -> bytes:
    """Return the frames of answers of success without fields, remark and body, in JSON: in one piece, for there are many."""
    frames: list[str] = []
    for opaque in opaques:
        digits = str(opaque)
        frames.append(f"{_DONE_HEADS[len(digits)]}{digits}{_BARE_TAIL}")
    return "".join(frames).encode("latin-1")


_DONE_HEAD: Final = '{"code":0,"flag":1,"language":"JAVA","opaque":'
_DONE_HEADS: Final = [
    f"{frame_head(len(_DONE_HEAD) + size + len(_BARE_TAIL)).decode('latin-1')}{_DONE_HEAD}" for size in range(12)
]
"""What is before the opaque, by its length."""


def encode_request(
    code: int,
    opaque: int,
    fields: Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    oneway: bool = False,
    language: str = "JAVA",
    serialization: int = JSON,
) -> bytes:
    """Return a whole request frame. ``BadRequest`` when ``opaque`` does not fit 32 bits."""
    flag = ONEWAY_FLAG if oneway else 0
    return _encode(code, opaque, flag, fields, None, len(body), language, serialization) + body


def _encode(
    code: int,
    opaque: int,
    flag: int,
    fields: Mapping[str, str] | None,
    remark: str | None,
    body_size: int,
    language: str,
    serialization: int,
) -> bytes:
    if opaque not in _INT32:
        raise BadRequest(f"the opaque {opaque} does not fit 32 bits")
    if serialization == JSON:
        header = _json_header(code, opaque, flag, fields, remark, language)
    else:
        header = _compact_header(code, opaque, flag, fields or {}, remark or "", language)
    return HEAD.pack(4 + len(header) + body_size, serialization << 24 | len(header)) + header


def _json_header(
    code: int, opaque: int, flag: int, fields: Mapping[str, str] | None, remark: str | None, language: str
) -> bytes:
    content: dict[str, Any] = {"code": int(code)}
    if fields is not None:
        content["extFields"] = fields
    content["flag"] = flag
    content["language"] = language
    content["opaque"] = opaque
    if remark is not None:
        content["remark"] = remark
    content["serializeTypeCurrentRPC"] = _SERIALIZATIONS[JSON]
    content["version"] = VERSION
    return orjson.dumps(content)


def _compact_header(code: int, opaque: int, flag: int, fields: Mapping[str, str], remark: str, language: str) -> bytes:
    pairs = b"".join(_pair(name.encode(), value.encode()) for name, value in fields.items())
    text = remark.encode()
    head = _COMPACT_HEAD.pack(code, LANGUAGES.index(language), VERSION, opaque, flag, len(text))
    return b"%b%b%b%b" % (head, text, _LENGTH.pack(len(pairs)), pairs)


def _pair(name: bytes, value: bytes) -> bytes:
    return b"%b%b%b%b" % (_NAME_LENGTH.pack(len(name)), name, _LENGTH.pack(len(value)), value)
