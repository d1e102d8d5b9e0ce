"""The results of checks: one line each, with advice."""

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple


class Level(enum.IntEnum):
    """The severity of a finding; its value is the exit code."""

    OK = 0
    WARNING = 1
    PROBLEM = 2


class Finding(NamedTuple):
    """The result of one check."""

    level: Level
    check: str
    found: str
    advice: str = ""
    """The action to take."""


def ok(check: str, found: str) -> Finding:
    return Finding(Level.OK, check, found)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(Level.WARNING, check, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    return Finding(Level.PROBLEM, check, found, advice)


NAMED: Final = 5
"""Of many things, at most this many are named."""


def some(names: Iterable[object]) -> str:
    """Return a list of names that stays short."""
    listed = sorted(map(str, names))
    more = len(listed) - NAMED
    return ", ".join(listed[:NAMED]) + (f" and {more} more" if more > 0 else "")
