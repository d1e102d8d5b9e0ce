"""How fast passwords and signatures can be guessed: a bucket for each address and one for all, which failures empty.

Who is right gets back what was taken, so only failures count. Somebody who was right before, from the same address, has a
bucket of its own: a client with a wrong password hinders neither the others on its machine nor those elsewhere.
"""

import ipaddress
import math
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from metaq.errors import AccessDenied

MOST_BUCKETS: Final = 10_000
MOST_KNOWN: Final = 10_000
ALL_TIMES: Final = 10
"""So many times the rate of one address for all together."""
NETWORK_BITS: Final = 64
"""Of an IPv6 address: whoever has one of a network has all of it."""

T = TypeVar("T")


class _Bucket:
    """Holds what one minute refills."""

    __slots__ = ("_left", "_rate", "_since")

    def __init__(self, rate: int, now_s: float) -> None:
        self._rate = rate
        self._left = float(rate)
        self._since = now_s

    def wait_s(self, now_s: float) -> float:
        """How long it lacks what one guess needs."""
        return max(0.0, 1 - self._now_left(now_s)) * 60 / self._rate

    def add(self, count: int, now_s: float) -> None:
        self._left, self._since = min(float(self._rate), self._now_left(now_s) + count), now_s

    def _now_left(self, now_s: float) -> float:
        return min(float(self._rate), self._left + (now_s - self._since) * self._rate / 60)


Taken = tuple[_Bucket, ...]
"""Buckets that one guess was taken from: by the time that it was right, others may be asked for the same name."""


class Guesses:
    """Counts failures."""

    def __init__(self, per_minute: int, now: Callable[[], float]) -> None:
        """``per_minute`` failures from one address; ``now`` in seconds, of a clock that never goes back."""
        self._per_minute = per_minute
        self._now = now
        self._all = _Bucket(ALL_TIMES * per_minute, now())
        self._buckets: dict[Hashable, _Bucket] = {}  # the first was used longest ago
        self._known: dict[Hashable, None] = {}

    def take(self, address: str, name: str) -> Taken:
        """Before a password or signature is looked at; ``AccessDenied`` when it must not be. Who is right gets it back."""
        buckets, now_s = self._of(address, name), self._now()
        wait_s = max(bucket.wait_s(now_s) for bucket in buckets)
        if wait_s > 0:
            raise AccessDenied(
                f"too many wrong passwords or signatures (failed_logins_per_minute); try again in {math.ceil(wait_s)} s"
            )
        for bucket in buckets:
            bucket.add(-1, now_s)
        return buckets

    def give_back(self, taken: Taken) -> None:
        """It was no guess, or nobody has looked at it."""
        for bucket in taken:
            bucket.add(1, self._now())

    def remember(self, address: str, name: str) -> None:
        """Who has this name was right at this address."""
        known = (_network(address), name)
        self._known.pop(known, None)
        self._known[known] = None
        _shorten(self._known, MOST_KNOWN)

    def was_right(self, address: str, name: str, taken: Taken) -> None:
        """Give back what was taken, and remember who it was."""
        self.give_back(taken)
        self.remember(address, name)

    def knows(self, address: str, name: str) -> bool:
        """Whether this name was right at this address."""
        return (_network(address), name) in self._known

    def _of(self, address: str, name: str) -> Taken:
        place = _network(address)
        if (place, name) in self._known:
            return (self._bucket((place, name)),)
        return self._bucket(place), self._all

    def _bucket(self, key: Hashable) -> _Bucket:
        bucket = self._buckets.pop(key, None) or _Bucket(self._per_minute, self._now())
        self._buckets[key] = bucket
        _shorten(self._buckets, MOST_BUCKETS)
        return bucket


def _shorten(table: dict[Hashable, T], most: int) -> None:
    if len(table) > most:
        del table[next(iter(table))]


def _network(address: str) -> str:
    """What one attacker is taken to have: an IPv4 address, in whatever form, or a network of IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.version == 4:
        return str(found)
    return str(ipaddress.ip_network((found, NETWORK_BITS), strict=False))
