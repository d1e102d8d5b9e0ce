"""The data manager beside others that fail at each phase, with a real broker: the decision, and what is left undecided."""

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import transaction
from transaction.interfaces import IDataManager, TransactionFailedError
from zope.interface.verify import verifyObject

from metaq.client import TextClient, datamanager, xa
from metaq.client.text.textclient import Batch
from metaq.errors import ClientError, RouteNotFound, RouteProblem
from metaq.tx.xid import Xid
from tests.client.test_xa_session import LONG_S, Resource, xa_error
from tests.server.text.test_transactions import is_gone
from tests.support.broker import BrokerProcess, wait_until
from tests.support.fakebroker import FakeBroker
from tests.support.talk import Talk

TOPIC = "orders"
PHASES = ("tpc_begin", "commit", "tpc_vote", "tpc_finish")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process
    shutil.rmtree(process.data)


@pytest.fixture
def session(broker: BrokerProcess) -> Iterator[xa.XaSession]:
    with xa.connect(broker.address, qualifier="orders", timeout_s=LONG_S) as session:
        yield session


@pytest.fixture
def manager() -> transaction.TransactionManager:
    return transaction.TransactionManager()


def delivered(broker: BrokerProcess) -> list[bytes]:
    with TextClient(broker.host, broker.port, timeout_s=LONG_S) as client:
        batch: Batch = client.get(TOPIC)
        return [message.body for message in batch.messages]


class OneBroker:
    """The registry of one broker, which may be away."""

    def __init__(self) -> None:
        self.address: str | None = None

    def choose(self) -> str:
        return self.everyone()[0]

    def everyone(self) -> Sequence[str]:
        if self.address is None:
            raise RouteNotFound("", RouteProblem.REGISTRY_UNREACHABLE, "It is away.")
        return [self.address]

    def partition(self, topic: str, address: str, client: TextClient) -> int:
        return 0


class Database:
    """Another data manager, which may fail in one phase."""

    def __init__(self, sort_key: str = "~sqlalchemy:1", fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.phases: list[str] = []
        self._sort_key = sort_key

    def sortKey(self) -> str:
        return self._sort_key

    def _phase(self, name: str) -> None:
        self.phases.append(name)
        if name == self.fails_in:
            raise RuntimeError(name)

    def tpc_begin(self, txn: object) -> None:
        self._phase("tpc_begin")

    def commit(self, txn: object) -> None:
        self._phase("commit")

    def tpc_vote(self, txn: object) -> None:
        self._phase("tpc_vote")

    def tpc_finish(self, txn: object) -> None:
        self._phase("tpc_finish")

    def tpc_abort(self, txn: object) -> None:
        self._phase("tpc_abort")

    def abort(self, txn: object) -> None:
        self._phase("abort")


class Recovered(Database):
    """A data manager after whose commit another program finishes the branches, before this one does."""

    def __init__(self, broker: BrokerProcess) -> None:
        super().__init__()
        self._broker = broker

    def tpc_finish(self, txn: object) -> None:
        super().tpc_finish(txn)
        with xa.connect(self._broker.address, qualifier="orders", timeout_s=LONG_S) as other:
            assert xa.resolve(other, lambda _: True).committed == 1


def test_one_commit_for_both(broker: BrokerProcess, session: xa.XaSession, manager: transaction.TransactionManager) -> None:
    """MQ-073, MQ-078: messages are there when the transaction is; a session serves one transaction after the other."""
    database = Database()
    for body in (b"first", b"second"):
        with manager:
            xid = datamanager.join(session, manager)
            manager.get().join(database)
            session.send(TOPIC, body)
            assert session.branch == xid
        assert session.branch is None
    assert database.phases == [*PHASES, *PHASES]
    assert delivered(broker) == [b"first", b"second"]


def test_it_is_what_the_package_asks_for(session: xa.XaSession, manager: transaction.TransactionManager) -> None:
    """MQ-073: the interface, and a place behind every database."""
    datamanager.join(session, manager)
    (ours,) = manager.get()._resources
    assert verifyObject(IDataManager, ours)
    assert ours.transaction_manager is manager
    assert sorted([ours.sortKey(), "~sqlalchemy:999", "sqlalchemy.twophase:1", "~~"])[-1] == ours.sortKey()
    assert "branch XID:19793:" in repr(ours)
    manager.abort()


def test_abort(broker: BrokerProcess, session: xa.XaSession, manager: transaction.TransactionManager) -> None:
    """MQ-073, MQ-078: an exception in the transaction takes the messages back."""
    with pytest.raises(ZeroDivisionError), manager:
        datamanager.join(session, manager)
        session.send(TOPIC, b"never")
        raise ZeroDivisionError
    assert session.branch is None
    assert session.tpc_recover() == []
    assert delivered(broker) == []


@pytest.mark.parametrize("phase", PHASES)
def test_a_database_that_fails(
    broker: BrokerProcess, session: xa.XaSession, manager: transaction.TransactionManager, phase: str
) -> None:
    """MQ-078: before metaq is prepared the branch is rolled back; after that only the marker can tell, so it is left."""
    with pytest.raises(RuntimeError, match=phase), manager:
        xid = datamanager.join(session, manager)
        manager.get().join(Database(fails_in=phase))
        session.send(TOPIC, b"perhaps")
    assert session.branch is None
    assert delivered(broker) == []
    assert session.tpc_recover() == ([xid] if phase in PHASES[2:] else [])
    committed = phase == "tpc_finish"
    done = xa.resolve(session, lambda _: committed)
    assert (done.committed, done.rolled_back) == ((committed, not committed) if phase in PHASES[2:] else (0, 0))
    assert delivered(broker) == [b"perhaps"] * committed


def test_a_refused_vote(broker: BrokerProcess, session: xa.XaSession, manager: transaction.TransactionManager) -> None:
    """MQ-076, MQ-078: the database is not asked to commit then."""
    database = Database()
    with pytest.raises(xa.XaFailed, match="NOTA"), manager:
        xid = datamanager.join(session, manager)
        manager.get().join(database)
        session.send(TOPIC, b"never")
        with xa.connect(broker.address, qualifier="orders") as other:
            other.tpc_rollback(xid)
    assert database.phases == ["tpc_begin", "commit", "abort", "tpc_abort"]
    assert session.branch is None


def test_a_transaction_that_takes_nobody_in(session: xa.XaSession, manager: transaction.TransactionManager) -> None:
    """MQ-073: no branch is left open beside it."""
    manager.get().join(Database(fails_in="commit"))
    with pytest.raises(RuntimeError):
        manager.commit()
    with pytest.raises(TransactionFailedError):
        datamanager.join(session, manager)
    assert session.branch is None
    assert session.tpc_recover() == []


# -- a broker that does not answer ------------------------------------------------------------------------------------


def finish(resource: Resource, commits: list[tuple[int, str] | None], manager: transaction.TransactionManager) -> Xid:
    """One transaction, at the end of which the broker answers so."""
    resource.wanted["COMMIT_TWO_PHASE"] = commits
    with FakeBroker(resource.answer) as broker, xa.connect(f"127.0.0.1:{broker.port}", timeout_s=LONG_S) as session, manager:
        xid = datamanager.join(session, manager)
        session.send(TOPIC, b"x")
    return xid


@pytest.mark.parametrize("second", [(200, ""), xa_error(-4), xa_error(7)])
def test_a_commit_without_answer_is_repeated(manager: transaction.TransactionManager, second: tuple[int, str]) -> None:
    """MQ-076: once; that the branch is unknown then says that the first one has arrived, or an operator has committed it."""
    resource = Resource()
    finish(resource, [None, second], manager)
    assert resource.steps == ["BEGIN", "END", "PREPARE", "COMMIT_TWO_PHASE", "COMMIT_TWO_PHASE"]


@pytest.mark.parametrize("second", [None, xa_error(-7)])
def test_what_is_certain_but_not_confirmed_is_no_failure(
    manager: transaction.TransactionManager, second: tuple[int, str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """MQ-076, MQ-078: the marker is committed, so whoever repeated the transaction would do it twice."""
    with caplog.at_level(logging.ERROR, "metaq.client.datamanager"):
        xid = finish(Resource(), [None, second], manager)
    assert f"branch not committed yet, resolve() will do it xid={xid}" in caplog.text


def test_what_an_operator_has_committed_is_committed(manager: transaction.TransactionManager) -> None:
    """MQ-076: rows and messages agree, so the transaction has not failed."""
    resource = Resource()
    finish(resource, [xa_error(7)], manager)
    assert resource.steps[-1] == "COMMIT_TWO_PHASE"


def test_a_registry_that_is_away_with_its_broker(
    manager: transaction.TransactionManager, caplog: pytest.LogCaptureFixture
) -> None:
    """MQ-076: the session knows the place of its branch, and asks nobody for it."""
    resource, brokers = Resource(), OneBroker()
    resource.wanted["COMMIT_TWO_PHASE"] = [None, None]
    with FakeBroker(resource.answer) as broker:
        brokers.address = f"127.0.0.1:{broker.port}"
        with xa.XaSession(brokers, timeout_s=LONG_S) as session, manager:
            datamanager.join(session, manager)
            session.send(TOPIC, b"x", partition=0)
            brokers.address = None
    assert "branch not committed yet, resolve() will do it" in caplog.text


@pytest.mark.parametrize("answers", [[xa_error(6)], [None, xa_error(6)], [xa_error(8)]])
def test_what_was_decided_otherwise_is_raised(
    manager: transaction.TransactionManager, answers: list[tuple[int, str] | None]
) -> None:
    """MQ-076: by an operator."""
    with pytest.raises(xa.XaFailed, match=r"HEURRB|HEURHAZ"):
        finish(Resource(), answers, manager)


def test_what_another_program_has_committed_is_committed(
    broker: BrokerProcess,
    session: xa.XaSession,
    manager: transaction.TransactionManager,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MQ-076, MQ-078: it found the marker as soon as the database had committed, so rows and messages agree."""
    with caplog.at_level(logging.WARNING, "metaq.client.datamanager"), manager:
        xid = datamanager.join(session, manager)
        manager.get().join(Recovered(broker))
        session.send(TOPIC, b"paid")
    assert f"branch was over before its commit xid={xid}" in caplog.text
    assert session.branch is None
    assert delivered(broker) == [b"paid"]


def test_a_rollback_without_answer(manager: transaction.TransactionManager, caplog: pytest.LogCaptureFixture) -> None:
    """MQ-073: the abort holds nevertheless: nobody can commit the branch any more."""
    resource = Resource()
    resource.wanted["ROLLBACK"] = [None]
    with FakeBroker(resource.answer) as broker, xa.connect(f"127.0.0.1:{broker.port}", timeout_s=LONG_S) as session:
        datamanager.join(session, manager)
        manager.abort()
        assert session.branch is None
        with pytest.raises(ClientError, match="is in no branch"):
            session.tpc_commit()
    assert "branch not rolled back" in caplog.text


def test_joining_starts_a_branch_with_its_time(broker: BrokerProcess, manager: transaction.TransactionManager) -> None:
    """MQ-077: the broker has the branch as soon as it is enlisted, and rolls it back when its time is over."""
    with (
        xa.connect(broker.address, qualifier="orders", branch_timeout_s=1, timeout_s=LONG_S) as session,
        Talk(broker) as other,
    ):
        began = time.monotonic()
        xid = datamanager.join(session, manager)
        assert not is_gone(other, str(xid)) or time.monotonic() - began >= 1
        wait_until(lambda: is_gone(other, str(xid)), LONG_S, "its time is over")
        assert time.monotonic() - began >= 1
        with pytest.raises(ClientError, match="NOTA"):
            manager.commit()
        manager.abort()
    assert delivered(broker) == []
