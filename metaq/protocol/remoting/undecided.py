"""Undecided transactions as administrators see and decide them: 30010, 30011 and 30012 (docs/remoting.md).

Bodies are JSON. A list comes in pages::

    {"rows":[{"key":"XID:1:0a:0b:app","state":"prepared","since_ms":1700000000000,…}],"next":"8123904"}

``next`` says where the next page begins, and is ``null`` on the last one.
"""

import enum
from collections.abc import Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.headers import Int32

MOST_ROWS: Final = 500
"""Rows in one page: some 15 ms of work when 100,000 branches are undecided, during which other clients wait."""
MOST_MESSAGES: Final = 1000
"""The most messages of one branch that are shown."""
FORGET: Final = "forget"
"""The value of ``outcome`` in 30012 that forgets an earlier decision instead of making one."""


class UndecidedState(enum.StrEnum):
    """The states in which a transaction is listed as undecided."""

    PREPARED = "prepared"
    """XA branches that wait for their transaction manager."""
    HEURISTIC = "heuristic"
    """XA branches that an operator has decided, until their transaction manager has forgotten them (FORGET)."""
    HALF = "half"
    """RocketMQ's half messages, which wait for their producers."""


class ListTransactions(NamedTuple):
    """Ask for the transactions of one ``UndecidedState``, the oldest first (30010)."""

    state: str
    limit: Int32 = Int32(MOST_ROWS)
    after: str | None = None
    """The ``next`` of the previous page."""


class TransactionKey(NamedTuple):
    """Ask for one transaction (30011), by the key of a branch or the offset id of a half message."""

    key: str


class DecideTransaction(NamedTuple):
    """Decide a prepared branch, or forget such a decision (30012)."""

    key: str
    """The key of a branch."""
    outcome: str
    """One of ``metaq.tx.states.Decision``, or ``FORGET``."""


class Branch(NamedTuple):
    """A prepared or heuristic branch."""

    key: str
    state: str
    since_ms: int | None = None
    """When it was prepared. It and the next two are ``None`` for a heuristic branch and for one whose mark is damaged."""
    messages: int | None = None
    size: int | None = None
    """The size of its messages in bytes, as the limits of transactions count it."""
    outcome: str | None = None
    """What an operator decided."""


class HalfRow(NamedTuple):
    """An undecided transactional message."""

    offset_id: str
    """Its log offset now, as an offset id."""
    message_id: str
    """The id that the sender gave it."""
    topic: str
    partition: int
    group: str
    """The group of its producers."""
    since_ms: int
    checks: int
    """How often its producers were asked for the decision."""
    due_ms: int
    """When they are asked next."""
    size: int
    """The size of its body in bytes."""
    ordinal: int
    log_offset: int
    """With the ordinal, where the message was first: what a decision (37) names."""


class BranchMessage(NamedTuple):
    """A message of a prepared branch."""

    topic: str
    partition: int
    message_id: int
    attribute: str | None
    size: int
    """The size of its body in bytes."""
    born_ms: int


R = TypeVar("R", Branch, HalfRow, BranchMessage)


class Page(NamedTuple, Generic[R]):
    """Some rows of a list."""

    rows: list[R]
    next: str | None


def encode_page(page: Page[R]) -> bytes:
    """Return the body of the answer to 30010."""
    return fastjson.encode({"rows": [row._asdict() for row in page.rows], "next": page.next})


def encode_branch(branch: Branch, messages: list[BranchMessage], problem: str | None) -> bytes:
    """Return the body of the answer to 30011 about a branch; ``problem`` says why its messages cannot be read."""
    rows = [message._asdict() for message in messages]
    return fastjson.encode({"branch": branch._asdict(), "messages": rows, "problem": problem})


def encode_half(half: HalfRow) -> bytes:
    """Return the body of the answer to 30011 about a half message."""
    return fastjson.encode({"half": half._asdict()})


def read_row(row: Mapping[str, Any], kind: type[R]) -> R:
    """Return a row of one of the classes above; unknown members are left out. ``KeyError`` when one is missing."""
    return kind(*(row[name] for name in kind._fields))
