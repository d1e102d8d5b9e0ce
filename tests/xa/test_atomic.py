"""A sample of the transactions, and proof that the comparison finds every kind of error."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.command import Violation
from tests.support.broker import BrokerProcess
from tests.support.samples import seed_of_tree
from tests.xa.atomic import VICTIMS, Case, run
from tests.xa.postgres import Postgres

pytestmark = pytest.mark.partner("postgres")


def test_a_few_rows_and_messages_agree() -> None:
    """MQ-071, MQ-078: other transactions for each commit."""
    assert run(seed_of_tree(), count=10).cases >= 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_and_messages_agree() -> None:
    """MQ-071, MQ-078: 40 transactions, with SIGKILL of the program, the broker and PostgreSQL at random steps."""
    result = run(seed=0, count=40)
    assert result.cases >= 40
    assert min(result.details[f"kills of {victim}"] for victim in VICTIMS) > 0
    assert result.details["committed"] > 10


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with Postgres() as postgres, BrokerProcess(tmp_path / "data") as broker:
        case = Case(random.Random(0), broker, postgres)
        case.prepare()
        yield case


def test_the_comparison_sees_what_is_wrong(case: Case) -> None:
    """MQ-078: rows without messages, messages without rows, doubled ones, and what is left prepared."""
    order = "INSERT INTO orders VALUES (%s, %s)"
    mark = "INSERT INTO outcome VALUES (%s, true)"
    with case.postgres.connect() as connection, case.client() as client, case.session() as session:
        connection.execute(order, (b"a", 1))
        with pytest.raises(Violation, match="rows and markers are one"):
            case.check()
        connection.execute(mark, (b"a",))
        with pytest.raises(Violation, match="the messages of a row, each once"):
            case.check()
        client.put("orders", b"61 0", partition=0)
        case.check()
        client.put("orders", b"62 0", partition=0)
        with pytest.raises(Violation, match="no message without its row"):
            case.check()
        connection.execute(order, (b"b", 2))
        connection.execute(mark, (b"b",))
        client.put("orders", b"61 1", partition=0)
        with pytest.raises(Violation, match="the messages of a row, each once"):
            case.check()
        connection.execute("UPDATE orders SET messages = 2")
        client.put("orders", b"62 1", partition=0)
        case.check()
        with pytest.raises(Violation, match="stand together"):
            case.check_everything()
        session.tpc_begin(session.xid(1, "left", ""))
        session.send("orders", b"63 0")
        session.tpc_prepare()
        session.leave()
        with pytest.raises(Violation, match="the broker has nothing prepared"):
            case.check()
        for left in session.tpc_recover():
            session.tpc_rollback(left)
        with connection.transaction():
            connection.execute(order, (b"c", 0))
            connection.execute("PREPARE TRANSACTION 'left'")
        with pytest.raises(Violation, match="the database has nothing prepared"):
            case.check()


def test_what_was_told_to_be_committed_must_be_there(case: Case) -> None:
    """MQ-078: also when it is missing on both sides."""
    case.committed.add(b"a")
    with pytest.raises(Violation, match="what was told to be committed"):
        case.check()
