"""The results of checks: one line each, with advice, and an exit code for all."""

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple

from metaq.cli.tables import print_record, print_rows


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


def print_findings(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print all findings. Return the exit code."""
    listed = list(findings)
    rows = [{**finding._asdict(), "level": finding.level.name.lower()} for finding in listed]
    if as_json:
        for row in rows:
            print_record(row, as_json=True)
    else:
        print_rows(
            [
                {
                    "level": row["level"],
                    "check": row["check"],
                    "found": f"{row['found']} → {row['advice']}" if row["advice"] else row["found"],
                }
                for row in rows
            ],
            as_json=False,
        )
    return max((finding.level for finding in listed), default=Level.OK).value
