"""Message ids as RocketMQ writes them, in hexadecimal digits (specs: store format, section 2).

::

    offset id, 32 or 56 digits            unique id, 32 or 56 digits
    4 or 16  address of the broker        4 or 16  address of the sender
    4        port                         2        its process, lower bits
    8        log offset                   4        a number of the process: in Java, the hash of the class loader
                                          4        milliseconds since the month began
                                          2        counter

The broker makes the offset id, which says where the message is. The client makes the unique id (property UNIQ_KEY), which
stays with the message wherever it goes. Clients in other languages fill it in other ways: compare ids as strings.
"""

import datetime
import ipaddress
import struct
from functools import lru_cache
from typing import Final, NamedTuple

from metaq.errors import BadRequest
from metaq.message import LogOffset
from metaq.protocol.record import host_bytes

_PLACE: Final = struct.Struct(">iq")  # port, log offset
_SENDER: Final = struct.Struct(">HIIH")  # process, number, milliseconds, counter
_ADDRESS_SIZES: Final = (4, 16)
_DAY_MS: Final = 86_400_000

assert _PLACE.size == _SENDER.size == 12


class OffsetId(NamedTuple):
    """Where a broker keeps a message."""

    address: str
    """IPv4, or IPv6 unless that is an IPv4 address in IPv6 form."""
    port: int
    log_offset: LogOffset

    def is_of(self, host: str, port: int) -> bool:
        """Return whether a broker that advertises this address makes such ids.

        All that advertise a name or IPv6 make the same: these have no address in records.
        """
        return host_bytes(self.address, self.port) == host_bytes(host, port)


class UniqueId(NamedTuple):
    """The sender of a message and the time of sending, as a Java client puts them into a unique id."""

    address: str
    process: int
    """16 bits."""
    number: int
    """32 bits."""
    month_ms: int
    """Milliseconds since the sender's month began, by its calendar; 32 bits."""
    counter: int
    """16 bits."""


def encode_offset_id(where: OffsetId) -> str:
    """Return an offset id: 32 or 56 upper-case digits. ``BadRequest`` when the address is not an IP address."""
    return (_packed(where.address) + _PLACE.pack(where.port, where.log_offset)).hex().upper()


def offset_id_of(store_host: bytes, log_offset: int) -> str:
    """Return an offset id; ``store_host`` is the broker's address and port as records have them."""
    return f"{store_host.hex().upper()}{log_offset:016X}"


def decode_offset_id(text: str) -> OffsetId:
    """Return what an offset id says; its digits may be in either case. ``BadRequest`` when the text is not such an id."""
    address, rest = _split(text)
    port, log_offset = _PLACE.unpack(rest)
    if not 0 <= port < 65536 or log_offset < 0:
        raise BadRequest(f"message id {text}: port {port} and log offset {log_offset} are impossible")
    return OffsetId(address, port, LogOffset(log_offset))


def unique_id_prefix(address: str, process: int, number: int) -> str:
    """Return what the unique ids of a sender begin with; ``BadRequest`` when the address is not an IP address.

    ``process`` and ``number`` lose the bits above their width.
    """
    return f"{_packed(address).hex().upper()}{process & 0xFFFF:04X}{number & 0xFFFFFFFF:08X}"


def make_unique_id(prefix: str, now_ms: int, counter: int) -> str:
    """Return the id that a Java client in UTC makes: 32 or 56 upper-case digits. ``counter`` loses the bits above its width."""
    return f"{prefix}{now_ms - _month_begin_ms(now_ms):08X}{counter & 0xFFFF:04X}"


def decode_unique_id(text: str) -> UniqueId:
    """Return what a Java client put into a unique id.

    The ids of other clients decode too, but to meaningless values. ``BadRequest`` when the text is not 32 or 56 hex digits.
    """
    address, rest = _split(text)
    return UniqueId(address, *_SENDER.unpack(rest))


def sent_ms(unique: UniqueId, now_ms: int) -> int:
    """Return when the message of a unique id was sent, in Unix milliseconds.

    That is in the month of ``now_ms``, or in the month before when it would be later than ``now_ms``. Months begin in UTC here:
    the result is off by the sender's time zone, and for older messages by whole months.
    """
    begin_ms = _month_begin_ms(now_ms)
    if begin_ms + unique.month_ms > now_ms:
        begin_ms = _month_begin_ms(begin_ms - 1)
    return begin_ms + unique.month_ms


def _month_begin_ms(now_ms: int) -> int:
    return _month_begin_of_day(now_ms // _DAY_MS)


@lru_cache(maxsize=16)
def _month_begin_of_day(day: int) -> int:
    now = datetime.datetime.fromtimestamp(day * _DAY_MS // 1000, datetime.UTC)
    return int(now.replace(day=1).timestamp()) * 1000


def _packed(address: str) -> bytes:
    try:
        return ipaddress.ip_address(address).packed
    except ValueError as error:
        raise BadRequest(f"message id: {address!r} is not an IP address") from error


def _split(text: str) -> tuple[str, bytes]:
    """Return the address and the twelve bytes after it."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    size = len(data) - _PLACE.size
    if size not in _ADDRESS_SIZES or len(text) != 2 * len(data):
        raise BadRequest(f"message id {text[:60]!r}: not 32 or 56 hexadecimal digits")
    address = ipaddress.ip_address(data[:size])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), data[size:]
