"""PURE: sizes and lengths of time as people write them: 512M, 3d, 250ms."""

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

_WRITTEN: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")
_MOST_CHARACTERS: Final = 400
"""Characters that are read: the smallest float has 326."""
_SHOWN_CHARACTERS: Final = 40
MOST: Final = (1 << 63) - 1
"""The greatest number: times and sizes have 64 bits."""


class Unit(NamedTuple):
    """A unit in which numbers are kept, and those in which they may be written.

    A suffix has one meaning: 1GB, which some read as 1000³ and some as 1024³, has none, and neither has 1m as a size.
    """

    noun: str
    factors: Mapping[str, Fraction]
    """The suffixes from the smallest, and how many of this unit each is."""
    form: str
    """What a person may write, for errors."""

    def parse(self, text: str) -> Fraction:
        """Return the number of this unit that ``text`` means. ``ValueError`` gives the text and the form that is wanted."""
        found = _WRITTEN.fullmatch(text) if len(text) <= _MOST_CHARACTERS else None
        factor = None if found is None else self.factors.get(found[2])
        if found is None or factor is None:
            raise ValueError(f"{shorten(text)} is no {self.noun}; write {self.form}")
        number = Fraction(found[1]) * factor
        if number > MOST:
            raise ValueError(f"{shorten(text)} does not fit into 64 bits; write {self.form}")
        return number

    def write(self, number: float) -> str:
        """Return the shortest text in whole units that ``parse`` reads as the same number, which is not negative."""
        exact = Fraction(repr(number))
        for suffix, factor in reversed(list(self.factors.items())):
            if exact and (exact / factor).denominator == 1:
                return f"{exact / factor}{suffix}"
        base = next(suffix for suffix, factor in self.factors.items() if factor == 1)
        return f"{Decimal(repr(number)):f}{base}" if exact else "0"


def shorten(given: object) -> str:
    """Return what was given as errors quote it."""
    shown = repr(given)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}…"


def _lengths(ms: int) -> Mapping[str, Fraction]:
    """Return the suffixes of lengths of time, for a unit of this many milliseconds."""
    all_ms = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
    return {"": Fraction(1)} | {suffix: Fraction(of_suffix, ms) for suffix, of_suffix in all_ms.items()}


_SIZES: Final = {sign: Fraction(1024**power) for power, sign in enumerate(("", "K", "M", "G", "T"))}
_LONG_SIZES: Final = {f"{sign}iB": factor for sign, factor in _SIZES.items() if sign}

BYTES: Final = Unit("size", _LONG_SIZES | _SIZES, "a number of bytes, or 64K, 512M, 1G, 2T (K is 1024)")
MILLISECONDS: Final = Unit("length of time", _lengths(1), "a number of milliseconds, or 250ms, 90s, 15m, 12h, 3d")
HOURS: Final = Unit("length of time", _lengths(3_600_000), "a number of hours, or 90m, 12h, 3d")

UNITS: Final[Mapping[str, Unit]] = {"bytes": BYTES, "ms": MILLISECONDS, "hours": HOURS}
"""The unit of a setting by the last word of its name."""


def unit_of(name: str) -> Unit | None:
    """Return the unit in which a setting is, as its name says; ``None`` if it is neither a size nor a length of time."""
    return UNITS.get(name.rpartition("_")[2])
