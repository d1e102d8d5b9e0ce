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

_ALL: Final = "all"
T = TypeVar("T")


class Guesses:
    """Counts failures. Each bucket holds what one minute refills."""

    def __init__(self, per_minute: int, now: Callable[[], float]) -> None:
        """``per_minute`` failures from one address; ``now`` in seconds, of a clock that never goes back."""
        self._per_minute = per_minute
        self._now = now
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # what is left, and when; the first was used longest ago
        self._known: dict[Hashable, None] = {}

    def take(self, address: str, name: str) -> None:
        """Before a password or signature is looked at; ``AccessDenied`` when it must not be."""
        wait_s = max(self._wait_s(bucket, rate) for bucket, rate in self._of(address, name))
        if wait_s > 0:
            raise AccessDenied(
                f"too many wrong passwords or signatures (failed_logins_per_minute); try again in {math.ceil(wait_s)} s"
            )
        for bucket, rate in self._of(address, name):
            self._add(bucket, rate, -1)

    def was_right(self, address: str, name: str) -> None:
        """Give back what was taken."""
        for bucket, rate in self._of(address, name):
            self._add(bucket, rate, 1)
        known = (_network(address), name)
        self._known.pop(known, None)
        self._known[known] = None
        _shorten(self._known, MOST_KNOWN)

    def _of(self, address: str, name: str) -> list[tuple[Hashable, int]]:
        place = _network(address)
        if (place, name) in self._known:
            return [((place, name), self._per_minute)]
        return [(place, self._per_minute), (_ALL, ALL_TIMES * self._per_minute)]

    def _left(self, bucket: Hashable, rate: int) -> float:
        left, since = self._buckets.get(bucket, (float(rate), 0.0))
        return min(float(rate), left + (self._now() - since) * rate / 60)

    def _wait_s(self, bucket: Hashable, rate: int) -> float:
        return max(0.0, 1 - self._left(bucket, rate)) * 60 / rate

    def _add(self, bucket: Hashable, rate: int, count: int) -> None:
        left = min(float(rate), self._left(bucket, rate) + count)
        self._buckets.pop(bucket, None)
        self._buckets[bucket] = (left, self._now())
        _shorten(self._buckets, MOST_BUCKETS)


def _shorten(table: dict[Hashable, T], most: int) -> None:
    if len(table) > most:
        del table[next(iter(table))]


def _network(address: str) -> str:
    """What one attacker is taken to have: an IPv4 address, or a network of IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(ipaddress.ip_network((found, NETWORK_BITS), strict=False))
