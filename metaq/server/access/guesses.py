"""Rate limits for guessing passwords and signatures: a token bucket for each address and one for all.

A correct password or signature gives back what was taken, so only failures count. A user who was correct before, from the same
address, has a bucket of its own: a client with a wrong password does not lock out others on its machine or elsewhere.
"""

import ipaddress
import math
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from metaq.errors import AccessDenied

MOST_BUCKETS: Final = 10_000
MOST_KNOWN: Final = 10_000
ALL_TIMES: Final = 10
"""The rate of the bucket for all addresses, as a multiple of that for one."""
NETWORK_BITS: Final = 64
"""An IPv6 client that has one address is taken to have its whole network of this prefix length."""

T = TypeVar("T")


class _Bucket:
    """A token bucket that refills in one minute."""

    __slots__ = ("_left", "_rate", "_since")

    def __init__(self, rate: int, now_s: float) -> None:
        self._rate = rate
        self._left = float(rate)
        self._since = now_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the bucket has what one guess needs."""
        return max(0.0, 1 - self._now_left(now_s)) * 60 / self._rate

    def add(self, count: int, now_s: float) -> None:
        self._left, self._since = min(float(self._rate), self._now_left(now_s) + count), now_s

    def _now_left(self, now_s: float) -> float:
        return min(float(self._rate), self._left + (now_s - self._since) * self._rate / 60)


Taken = tuple[_Bucket, ...]
"""The buckets that one guess was taken from: once it proves correct, the lookup might return other buckets for the same
name."""


class Guesses:
    """Counts failures and enforces their limits."""

    def __init__(self, per_minute: int, now: Callable[[], float]) -> None:
        """Allow ``per_minute`` failures from one address. ``now`` returns seconds of a clock that never goes back."""
        self._per_minute = per_minute
        self._now = now
        self._all = _Bucket(ALL_TIMES * per_minute, now())
        self._buckets: dict[Hashable, _Bucket] = {}  # the first was used longest ago
        self._known: dict[Hashable, None] = {}

    def take(self, address: str, name: str) -> Taken:
        """Take one guess before a password or signature is checked, and return the buckets for ``give_back``.

        Raise ``AccessDenied`` when a limit is reached.
        """
        return self._take_from(self._of(address, name))

    def take_for_known(self, address: str) -> Taken:
        """Take one guess at the secrets of all users that were proved from this address before, whoever is meant.

        These guesses have a bucket of their own, so that they use up no user's. Raise ``AccessDenied`` when it is empty.
        """
        return self._take_from((self._bucket((_network(address), None)),))

    def _take_from(self, buckets: Taken) -> Taken:
        now_s = self._now()
        wait_s = max(bucket.wait_s(now_s) for bucket in buckets)
        if wait_s > 0:
            raise AccessDenied(
                f"too many wrong passwords or signatures (failed_logins_per_minute); try again in {math.ceil(wait_s)} s"
            )
        for bucket in buckets:
            bucket.add(-1, now_s)
        return buckets

    def give_back(self, taken: Taken) -> None:
        """Give back what was taken, for a guess that proved correct or was never checked."""
        for bucket in taken:
            bucket.add(1, self._now())

    def was_right(self, address: str, name: str, taken: Taken) -> None:
        """Give back what was taken, and remember that this name was proved from this address."""
        self.give_back(taken)
        known = (_network(address), name)
        self._known.pop(known, None)
        self._known[known] = None
        _shorten(self._known, MOST_KNOWN)

    def knows(self, address: str, name: str) -> bool:
        """Return whether this name was proved from this address before."""
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
    """Return the part of the address space that one attacker is taken to control: an IPv4 address in its usual form, or an IPv6
    network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.version == 4:
        return str(found)
    return str(ipaddress.ip_network((found, NETWORK_BITS), strict=False))
