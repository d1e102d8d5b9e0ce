"""Undecided transactions as administrators see and decide them: 30010, 30011 and 30012 (docs/remoting.md).

Bodies are JSON. A list comes in pages::

    {"rows":[{"key":"XID:1:0a:0b:app","state":"prepared","since_ms":1700000000000,…}],"next":"8123904"}

``next`` is where the next page begins, ``null`` on the last one.
"""

import enum
from collections.abc import Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.headers import Int32

MOST_ROWS: Final = 500
"""In one page: some 15 ms of work when 100,000 branches are undecided, which hold up everybody else."""
MOST_MESSAGES: Final = 1000
"""Of one branch that are told."""
FORGET: Final = "forget"
"""What 30012 asks for beside an outcome."""


class State(enum.StrEnum):
    """What waits for whom."""

    PREPARED = "prepared"
    """XA branches that wait for their transaction manager."""
    HEURISTIC = "heuristic"
    """XA branches that an operator has decided, until their transaction manager has taken notice."""
    HALF = "half"
    """RocketMQ's transactional messages that wait for their producers."""


class ListTransactions(NamedTuple):
    """30010: those of one ``State``, the oldest first."""

    state: str
    limit: Int32 = Int32(MOST_ROWS)
    after: str | None = None
    """``next`` of the page before."""


class TransactionKey(NamedTuple):
    """30011: the key of a branch, or the offset id of a half message."""

    key: str


class DecideTransaction(NamedTuple):
    """30012."""

    key: str
    """Of a branch."""
    outcome: str
    """One of ``metaq.tx.branches.Outcome``, or ``FORGET``."""


class Branch(NamedTuple):
    """A prepared or heuristic branch."""

    key: str
    state: str
    since_ms: int | None = None
    """When it was prepared; with the next two ``None`` for a heuristic one, and where its mark in the log is damaged."""
    messages: int | None = None
    size: int | None = None
    """Of its messages, in bytes, as the limits of transactions count it."""
    outcome: str | None = None
    """What an operator decided."""


class Half(NamedTuple):
    """An undecided transactional message."""

    offset_id: str
    """Where it is now."""
    message_id: str
    """The sender's."""
    topic: str
    partition: int
    group: str
    """Of its producers."""
    since_ms: int
    checks: int
    """How often its producers were asked."""
    due_ms: int
    """When they are asked next."""
    size: int
    """Of its body, in bytes."""
    ordinal: int
    log_offset: int
    """With the ordinal what a decision (37) names: where the message was first."""


class BranchMessage(NamedTuple):
    """A message of a prepared branch."""

    topic: str
    partition: int
    message_id: int
    attribute: str | None
    size: int
    """Of its body, in bytes."""
    born_ms: int


R = TypeVar("R", Branch, Half, BranchMessage)


class Page(NamedTuple, Generic[R]):
    """Some rows of a list."""

    rows: list[R]
    next: str | None


def encode_page(page: Page[R]) -> bytes:
    """Body of the answer to 30010."""
    return fastjson.encode({"rows": [row._asdict() for row in page.rows], "next": page.next})


def encode_branch(branch: Branch, messages: list[BranchMessage], problem: str | None) -> bytes:
    """Body of the answer to 30011 about a branch; ``problem`` says why its messages cannot be read."""
    rows = [message._asdict() for message in messages]
    return fastjson.encode({"branch": branch._asdict(), "messages": rows, "problem": problem})


def encode_half(half: Half) -> bytes:
    """Body of the answer to 30011 about a half message."""
    return fastjson.encode({"half": half._asdict()})


def read_row(row: Mapping[str, Any], kind: type[R]) -> R:
    """A row of one of the classes above; members that it does not know are left out. ``KeyError`` when one is missing."""
    return kind(*(row[name] for name in kind._fields))
