"""A program that places orders: rows in PostgreSQL and messages in metaq, in one transaction. It reports each step first."""

import contextlib
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
import transaction
import zope.sqlalchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from metaq.client import datamanager, xa

QUALIFIER: Final = "orders"
TOPIC: Final = "orders"
PARTITIONS: Final = 2
MOST_MESSAGES: Final = 4
TIMEOUT_S: Final = 30.0
PLACES: Final = ("!", "~~!", "~~~")
"""Before the database, between it and metaq, behind both; in the order of the names, as the transaction package has them."""
FIRST_STEPS: Final = ("begun", "rows written", "message sent", "begin !", "commit !", "commit ~~!")
LAST_STEPS: Final = ("commit ~~~", *(f"{phase} {place}" for phase in ("vote", "finish") for place in PLACES))
"""From where metaq is prepared on: here the outcome is made."""


class Table(DeclarativeBase):
    """The tables of the program."""


class Order(Table):
    """A row for each transaction: how many messages belong to it."""

    __tablename__ = "orders"
    gtrid: Mapped[bytes] = mapped_column(primary_key=True)
    messages: Mapped[int]


class Outcome(Table):
    """The marker row: whether a transaction was committed; ``resolve`` may enter first that it never will be."""

    __tablename__ = "outcome"
    gtrid: Mapped[bytes] = mapped_column(primary_key=True)
    committed: Mapped[bool]


class Task(NamedTuple):
    """The work for one worker."""

    seed: int
    transactions: int
    """So many, unless one fails."""
    two_phase: bool
    watched: bool
    """Whether it waits at each step until it is told to go on."""
    url: str
    address: str


class Ended(NamedTuple):
    """A worker's report of a transaction."""

    gtrid: bytes
    """Empty when it could not begin."""
    failure: str
    """Empty when it was committed."""


@contextlib.contextmanager
def database(url: str) -> Iterator[sa.Engine]:
    """Connections that are closed where they are given back, so that none outlives a server."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    try:
        yield engine
    finally:
        engine.dispose()


class Probe:
    """A data manager that does nothing but say which phase has come to its place among the others."""

    def __init__(self, place: str, at: Any) -> None:
        self.transaction_manager = transaction.manager
        self._place = place
        self._at = at

    def sortKey(self) -> str:
        return self._place

    def tpc_begin(self, txn: object) -> None:
        self._at(f"begin {self._place}")

    def commit(self, txn: object) -> None:
        self._at(f"commit {self._place}")

    def tpc_vote(self, txn: object) -> None:
        self._at(f"vote {self._place}")

    def tpc_finish(self, txn: object) -> None:
        self._at(f"finish {self._place}")

    def abort(self, txn: object) -> None:
        """Nothing was done."""

    tpc_abort = abort


def work(task: Task, pipe: Connection) -> None:
    """Order until done, or until a transaction fails; the pipe carries steps (``str``, watched only) and ``Ended``."""

    def at(step: str) -> None:
        if task.watched:
            pipe.send(step)
            pipe.recv()

    rng = random.Random(task.seed)
    with database(task.url) as engine, xa.connect(task.address, qualifier=QUALIFIER, timeout_s=TIMEOUT_S) as session:
        sessions = sessionmaker(engine, twophase=task.two_phase)
        zope.sqlalchemy.register(sessions)
        for _ in range(task.transactions):
            gtrid = b""
            try:
                with transaction.manager:
                    gtrid = datamanager.join(session).gtrid
                    order(sessions(), session, gtrid, rng, at)
            except Exception as error:  # noqa: BLE001 - whatever fails, there is one outcome: it failed
                pipe.send(Ended(gtrid, repr(error)))
                return
            pipe.send(Ended(gtrid, ""))


def order(rows: Session, session: xa.XaSession, gtrid: bytes, rng: random.Random, at: Any) -> None:
    """One transaction, short of its commit."""
    for place in PLACES:
        transaction.get().join(Probe(place, at))
    at("begun")
    messages = rng.randint(0, MOST_MESSAGES)
    rows.add(Order(gtrid=gtrid, messages=messages))
    rows.add(Outcome(gtrid=gtrid, committed=True))
    if rng.random() < 0.5:
        rows.flush()
        at("rows written")
    for number in range(messages):
        session.send(TOPIC, b"%b %d" % (gtrid.hex().encode(), number))
        at("message sent")
