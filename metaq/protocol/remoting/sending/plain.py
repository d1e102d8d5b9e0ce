"""Plain sends, of which most are alike: the headers that come again and again are parsed once.

The JSON header of one client's sends to one partition (request 310), or of its batches (320), differs in three values only. It
is cut at them::

    {"code":310,"extFields":{"a":"group","b":"orders",…,"g":"       before
    1790000000000                                                   when the message was made: 13 digits
    ","h":"0","i":"                                                 between
    UNIQ_KEY\\u00010A…\\u0002                                       properties
    ","j":"0",…},"flag":0,"language":"JAVA","opaque":               after
    4711                                                            opaque
    ,"serializeTypeCurrentRPC":"JSON","version":413}                last

Bytes that are equal to those of a header that was parsed mean what that one meant. So the next header only has to
be compared, and two numbers and a string to be read. Headers with these values in another order are parsed as ever.
"""

from typing import Final, NamedTuple

import orjson

from metaq.protocol.remoting.codes import ONEWAY_FLAG, RESPONSE_FLAG, Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.sysflag import COMPRESSED, COMPRESSION_KIND

UNUSUAL: Final = ~(COMPRESSED | COMPRESSION_KIND)
"""Bits of a sender's sysFlag that a plain send does not have."""
HEADS_KEPT: Final = 1024
LONGEST_HEAD: Final = 4096
"""Bytes of a header that is kept: anyone who may connect can have that many kept, and they are compared with each header."""
SEND: Final = int(Request.SEND_MESSAGE_V2)
BATCH: Final = int(Request.SEND_BATCH_MESSAGE)
_LETTERS: Final = frozenset("abcdefghijklmn")
"""The fields of a send. A header with another one, such as a signature, differs in it, and is not worth keeping."""
_BORN_NAME: Final = b'"g":"'
_PROPERTIES_NAME: Final = b'"i":"'
_OPAQUE_NAME: Final = b'"opaque":'
_BORN_DIGITS: Final = 13
_OPAQUE_DIGITS: Final = 9
"""The most digits that are read here: no number of so many is beyond 32 bits."""
_ZERO: Final = 0x30
_INT32: Final = range(-(1 << 31), 1 << 31)
_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""


class SendHead(NamedTuple):
    """The part of a plain send that is the same for many messages."""

    topic: str
    queue: str
    """The number of the partition, as it was sent."""
    sys_flag: int
    flag: int
    is_oneway: bool
    is_batch: bool
    serialization: int
    sample: RemotingCommand
    """A send that had it."""


class PlainSend(NamedTuple):
    """One send, of a message or of a batch, that asks for nothing but to be stored."""

    head: SendHead
    opaque: int
    born_ms: int
    properties: str
    body: bytes

    @property
    def code(self) -> int:
        return BATCH if self.head.is_batch else SEND

    @property
    def flag(self) -> int:
        return self.head.sample.flag

    def command(self) -> RemotingCommand:
        """Return the send as any request."""
        sample = self.head.sample
        fields = {**sample.fields, "g": str(self.born_ms)}
        if self.properties or "i" in fields:
            fields["i"] = self.properties
        return sample._replace(opaque=self.opaque, fields=fields, body=self.body)


def plain_send(request: RemotingCommand) -> PlainSend | None:
    """Return a request as a plain send; ``None`` when it is none."""
    is_batch = request.code == BATCH
    if not (is_batch or request.code == SEND) or request.flag & RESPONSE_FLAG:
        return None
    fields = request.fields
    try:
        sys_flag, flag, born_ms = int(fields["f"]), int(fields["h"]), int(fields["g"])
        if sys_flag & UNUSUAL or flag not in _INT32 or fields.get("j", "0") != "0":
            return None
        if fields.get("m") == "true" and not is_batch:
            return None
        is_oneway = bool(request.flag & ONEWAY_FLAG)
        head = _new(SendHead, (fields["b"], fields["e"], sys_flag, flag, is_oneway, is_batch, request.serialization, request))
    except (KeyError, ValueError):
        return None
    return _new(PlainSend, (head, request.opaque, born_ms, fields.get("i", ""), request.body))


class _Cut(NamedTuple):
    """A header that was parsed, without its three values and what is before them."""

    head: SendHead
    between: bytes
    after: bytes
    last: bytes


KnownHeads = dict[bytes, _Cut]
"""By what is before the first value."""


class SendReader:
    """The plain sends of one connection, read by their known headers."""

    def __init__(self, known: KnownHeads) -> None:
        """``known`` is a cache that the readers of one broker share."""
        self._known = known
        self._before = 0  # the length of what was before the first value of the previous plain send

    def read(self, data: bytes, start: int, end: int, stop: int) -> PlainSend | None:
        """Return the send whose header stands from ``start`` to ``end``; ``None`` when no header like it is known."""
        at = start + self._before
        cut = self._known.get(data[start:at])
        if cut is None:
            name_at = data.find(_BORN_NAME, start, end)
            if name_at < 0:
                return None
            at = name_at + len(_BORN_NAME)
            cut = self._known.get(data[start:at])
            if cut is None:
                return None
            self._before = at - start
        head, between, after, last = cut
        text_at = at + _BORN_DIGITS + len(between)
        digits_end = end - len(last)
        if text_at + len(after) >= digits_end:  # before slices are made: compiled, one that ends before it begins is an error
            return None
        if data[at + _BORN_DIGITS : text_at] != between or data[digits_end:end] != last:
            return None
        digits_at = digits_end
        opaque, unit = 0, 1
        while digits_end - digits_at < _OPAQUE_DIGITS:
            digit = data[digits_at - 1] - _ZERO
            if not 0 <= digit <= 9:
                break
            opaque += digit * unit
            unit *= 10
            digits_at -= 1
        text_end = digits_at - len(after)
        if text_end < text_at or data[text_end:digits_at] != after or digits_at == digits_end or data[digits_at] == _ZERO:
            return None  # JSON has no zeros before a number; 0 itself is rare
        try:
            text: str = "" if text_end == text_at else orjson.loads(data[text_at - 1 : text_end + 1])
            born_ms = int(data[at : at + _BORN_DIGITS])
        except ValueError:
            return None
        return _new(PlainSend, (head, opaque, born_ms, text, data[end:stop]))

    def learn(self, header: bytes, request: RemotingCommand) -> None:
        """Keep a header that was parsed, when it can be cut at the three values."""
        if len(header) > LONGEST_HEAD:
            return
        send = plain_send(request._replace(body=b""))  # a body would be kept as long as the header
        if send is None or not _LETTERS.issuperset(request.fields):
            return
        born_at = header.find(_BORN_NAME) + len(_BORN_NAME)
        born_end = born_at + _BORN_DIGITS
        text_at = header.find(_PROPERTIES_NAME, born_end) + len(_PROPERTIES_NAME)
        text_end = header.find(b'"', text_at)
        opaque_at = header.find(_OPAQUE_NAME, text_end) + len(_OPAQUE_NAME)
        if not born_end < text_at <= text_end < opaque_at:
            return  # they stand in another order
        digits_end = opaque_at
        while header[digits_end : digits_end + 1].isdigit():
            digits_end += 1
        if len(self._known) >= HEADS_KEPT:
            self._known.clear()
        before = header[:born_at]
        self._known[before] = _Cut(send.head, header[born_end:text_at], header[text_end:opaque_at], header[digits_end:])
        self._before = born_at
        if self.read(header, 0, len(header), len(header)) != send:
            del self._known[before]
