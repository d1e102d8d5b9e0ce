"""Rows in PostgreSQL and messages in metaq, committed together while the program, the broker or the database is killed.

A round: two programs (``tests.xa.worker``) run transactions, one of them step by step. At a step drawn by the seed, or a moment
after it, the victim gets SIGKILL: the program itself, the broker, or PostgreSQL with all its processes. The programs that are
left go on until they are done or fail. Then everything starts again and is recovered as docs/transactions.md says: what the
database still has prepared is rolled back, and ``resolve`` asks the marker rows. What must hold: the database has a row for
every transaction that was reported as committed; the topic has exactly the messages of the rows that are there, each once and
in order; nothing is left prepared on either side.

``python -m tests.xa.atomic --seed 7 --count 1000`` runs it.
"""

import argparse
import multiprocessing
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NamedTuple

import sqlalchemy as sa
from psycopg import sql

from metaq.client import TextClient, xa
from metaq.message import TextPosition
from metaq.tx.xid import Xid
from tests.crash.command import Result, expect
from tests.crash.driver import CaseFailed
from tests.support.broker import BrokerProcess, wait_until
from tests.xa.postgres import Postgres
from tests.xa.worker import FIRST_STEPS, LAST_STEPS, PARTITIONS, QUALIFIER, TIMEOUT_S, TOPIC, Ended, Table, Task, database, work

TRANSACTIONS: Final = 3
"""Of each program in a round."""
VICTIMS: Final = ("program", "broker", "PostgreSQL")
DEADLINE_S: Final = 120.0
LONGEST_MOMENT_S: Final = 0.004
"""Behind a step: about what the next one takes."""
ROUNDS_A_CASE: Final = 25
"""Then both folders begin anew, with other settings."""
LOCK_TIMEOUT: Final = "SET lock_timeout = '1s'"

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.xa.worker"])


def run(seed: int, count: int) -> Result:
    """At least ``count`` transactions, in cases from ``seed`` on."""
    details: Counter[str] = Counter()
    following = seed
    while details["transactions"] < count:
        details.update(one_case(following, count - details["transactions"]))
        following += 1
    return Result("atomic", range(seed, following), details["transactions"], dict(details))


def one_case(seed: int, count: int) -> dict[str, int]:
    """One broker's folder and one cluster: rounds until ``count`` transactions or ``ROUNDS_A_CASE`` rounds are through."""
    folder = Path(tempfile.mkdtemp(prefix=f"metaq-xa-{seed}-"))
    rng = random.Random(seed)
    flags = ("--segment-bytes", str(rng.choice((65_536, 4 << 20))), "--max-body-bytes", "4096", "--ample-free-bytes", "0")
    broker = BrokerProcess(folder / "data", *flags, durability=rng.choice(("disk", "memory")))
    with Postgres() as postgres, broker:
        case = Case(rng, broker, postgres)
        try:
            case.prepare()
            for _ in range(ROUNDS_A_CASE):
                case.round()
                if case.counts["transactions"] >= count:
                    break
            case.check_everything()
        except Exception as error:
            raise CaseFailed(
                f"after {case.counts}: {error!r}\nflags: {' '.join(flags)}\nfolder: {folder}\n"
                f"replay: python -m tests.xa.atomic --seed {seed} --count {count}"
            ) from error
    shutil.rmtree(folder)
    return dict(case.counts)


class _Fault(NamedTuple):
    """The fault of a round: the victim of the kill, and the moment."""

    victim: str
    transaction: int
    """Of the watched program."""
    step: str
    """The first of this name; not every transaction has every step."""
    moment_s: float
    """How long behind the step; 0 is while the program waits there."""


class Case:
    """The broker and the database, with what was reported as committed and what was found."""

    def __init__(self, rng: random.Random, broker: BrokerProcess, postgres: Postgres) -> None:
        self._rng = rng
        self._broker = broker
        self.postgres = postgres
        self.committed: set[bytes] = set()
        self._found: defaultdict[bytes, list[int]] = defaultdict(list)
        self._positions = [TextPosition(0)] * PARTITIONS
        self._nothing_fails = True  # as the broker and the database run
        self.counts: Counter[str] = Counter()

    def prepare(self) -> None:
        """Tables and topic."""
        with database(self.postgres.url) as engine:
            Table.metadata.create_all(engine)
        with self.client() as client:
            client.create(TOPIC, PARTITIONS)

    def round(self) -> None:
        """Run, kill, recover, compare."""
        victim = self._rng.choice(VICTIMS)
        fault = _Fault(
            victim,
            self._rng.randrange(TRANSACTIONS),
            self._rng.choice(self._rng.choice((FIRST_STEPS, LAST_STEPS, LAST_STEPS))),
            self._rng.choice((0.0, self._rng.uniform(0, LONGEST_MOMENT_S))),
        )
        two_phase = self._rng.random() < 0.75
        pairs = [_processes.Pipe() for _ in range(2)]
        programs = [
            _processes.Process(target=work, args=(self._task(two_phase, watched=not number), theirs))
            for number, (_, theirs) in enumerate(pairs)
        ]
        for program, (_, theirs) in zip(programs, pairs, strict=True):
            program.start()
            theirs.close()
        try:
            self._watch([mine for mine, _ in pairs], programs[0], fault)
            for program in programs:
                program.join(DEADLINE_S)
                killed = victim == "program" and program is programs[0]
                expect(program.exitcode == 0 or (killed and program.exitcode == -signal.SIGKILL), "a program ends", program)
        finally:
            for program in programs:
                program.kill()
                program.join()
            for mine, _ in pairs:
                mine.close()
        expect(victim == "broker" or self._broker.running, "the broker runs until it is killed", self._broker.stderr()[-2000:])
        expect(victim == "PostgreSQL" or self.postgres.running, "PostgreSQL runs until it is killed")
        self.counts["in two phases" if two_phase else "in one phase"] += 1
        self._recover()
        self.check()

    def _task(self, two_phase: bool, *, watched: bool) -> Task:
        seed = self._rng.getrandbits(32)
        return Task(seed, TRANSACTIONS, two_phase, watched, self.postgres.url, self._broker.address)

    def _watch(self, pipes: list[Connection], watched: BaseProcess, fault: _Fault) -> None:
        """Let the watched program go from step to step, kill the victim at one of them, and take what all have to tell."""
        self._nothing_fails = True
        ended, still_to_come = 0, True
        open_pipes = list(pipes)
        while open_pipes:
            ready = [pipe for pipe in wait(open_pipes, DEADLINE_S) if isinstance(pipe, Connection)]
            expect(bool(ready), "a program goes on", fault)
            for pipe in ready:
                try:
                    told = pipe.recv()
                    if isinstance(told, Ended):
                        self._take(told)
                        ended += pipe is pipes[0]
                        continue
                    is_now = still_to_come and (ended, told) == (fault.transaction, fault.step)
                    if is_now and not fault.moment_s:
                        self._kill(fault.victim, watched)
                    pipe.send(None)
                    if is_now and fault.moment_s:
                        _pass(fault.moment_s)
                        self._kill(fault.victim, watched)
                    still_to_come &= not is_now
                except (EOFError, ConnectionError):
                    open_pipes.remove(pipe)

    def _take(self, told: Ended) -> None:
        self.counts["transactions"] += bool(told.gtrid)
        if told.failure:
            expect(not self._nothing_fails, "nothing fails while everything runs", told.failure)
            self.counts["failed"] += 1
        else:
            self.counts["committed"] += 1
            self.committed.add(told.gtrid)

    def _kill(self, victim: str, watched: BaseProcess) -> None:
        self.counts[f"kills of {victim}"] += 1
        if victim == "program":
            watched.kill()
            self.counts["transactions"] += 1  # that it was in, and tells no more
            return
        self._nothing_fails = False
        if victim == "broker":
            self._broker.kill()
        else:
            self.postgres.kill()

    # -- recovery -----------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        if not self.postgres.running:
            self.postgres.start()
        if not self._broker.running:
            self._broker.start()
        wait_until(self._is_at_rest, DEADLINE_S, "the database is done with what killed programs told it last")
        with database(self.postgres.url) as engine, self.session() as session:
            wait_until(lambda: self._resolved(engine, session), DEADLINE_S, "everything is resolved")

    def _is_at_rest(self) -> bool:
        """Return whether no process of the database serves a program any more."""
        with self.postgres.connect() as connection:
            others = "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            return connection.execute(others).fetchone() is None

    def _resolved(self, engine: sa.Engine, session: xa.XaSession) -> bool:
        self._roll_back_prepared_rows()
        done = xa.resolve(session, lambda xid: is_committed(engine, xid))
        expect(not done.conflicts and not done.unreachable, "every branch can be resolved", done)
        self.counts["branches committed by resolve"] += done.committed
        self.counts["branches rolled back by resolve"] += done.rolled_back
        return not done.undecided

    def _roll_back_prepared_rows(self) -> None:
        with self.postgres.connect() as connection:
            for (gid,) in connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
                self.counts["rows rolled back in the database"] += 1

    # -- comparison ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Read the new messages, and compare all messages so far with all rows."""
        with self.client() as client:
            for partition in range(PARTITIONS):
                for message in client.iterate(TOPIC, partition=partition, position=self._positions[partition]):
                    gtrid, number = message.body.split()
                    self._found[bytes.fromhex(gtrid.decode())].append(int(number))
                    self._positions[partition] = message.next_position
        with self.postgres.connect() as connection:
            rows: dict[bytes, int] = dict(connection.execute("SELECT gtrid, messages FROM orders").fetchall())
            left = connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone()
            marked = connection.execute("SELECT gtrid FROM outcome WHERE committed").fetchall()
        expect(left == (0,), "the database has nothing prepared", left)
        expect({gtrid for (gtrid,) in marked} == rows.keys(), "rows and markers are one")
        expect(self.committed <= rows.keys(), "what was told to be committed is in the database", self.committed - rows.keys())
        expect(self._found.keys() <= rows.keys(), "no message without its row", self._found.keys() - rows.keys())
        for gtrid, messages in rows.items():
            found = self._found[gtrid] if messages else []
            expect(sorted(found) == list(range(messages)), "the messages of a row, each once", gtrid, messages, found)
        with self.session() as session:
            expect(session.tpc_recover() == [], "the broker has nothing prepared")

    def check_everything(self) -> None:
        """All messages from the beginning; in each partition those of a transaction stand together and in order."""
        self._found.clear()
        self._positions = [TextPosition(0)] * PARTITIONS
        self.check()
        with self.client() as client:
            for partition in range(PARTITIONS):
                places: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
                for place, message in enumerate(client.iterate(TOPIC, partition=partition)):
                    gtrid, number = message.body.split()
                    places[gtrid].append((place, int(number)))
                for gtrid, found in places.items():
                    first = found[0][0]
                    together = [place for place, _ in found] == list(range(first, first + len(found)))
                    expect(together, "the messages of a transaction stand together", gtrid, found)
                    expect(found == sorted(found, key=lambda pair: pair[1]), "and in order", gtrid, found)

    def client(self) -> TextClient:
        """A client of the broker that runs now."""
        return TextClient(self._broker.host, self._broker.port, timeout_s=TIMEOUT_S)

    def session(self) -> xa.XaSession:
        """One that recovers what the programs have left."""
        return xa.connect(self._broker.address, qualifier=QUALIFIER, timeout_s=TIMEOUT_S)


def _pass(seconds: float) -> None:
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, seconds + 1, "the moment of the kill")


def is_committed(engine: sa.Engine, xid: Xid) -> bool | None:
    """Return what the marker row says; ``None`` while the transaction that wrote it has not ended.

    Where there is no row, insert one that says no: it keeps a late commit from happening.
    """
    try:
        with engine.begin() as connection:
            connection.execute(sa.text(LOCK_TIMEOUT))
            never = sa.text("INSERT INTO outcome (gtrid, committed) VALUES (:gtrid, false) ON CONFLICT DO NOTHING")
            connection.execute(never, {"gtrid": xid.gtrid})
            asked = sa.text("SELECT committed FROM outcome WHERE gtrid = :gtrid")
            return bool(connection.execute(asked, {"gtrid": xid.gtrid}).scalar_one())
    except sa.exc.OperationalError:  # the lock of a transaction that has not ended
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    print(run(options.seed, options.count))


if __name__ == "__main__":
    main()
