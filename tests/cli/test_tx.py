"""Undecided transactions on the command line: branches, transactional messages, and what operators decide."""

import shutil
from collections.abc import Iterator

import pytest

import metaq.client.xa
from metaq.client import Client, Outcome
from metaq.client.xa import XaFailed, XaSession
from metaq.protocol.remoting.codes import Request, Response
from metaq.tx.xacodes import XaCode
from metaq.tx.xid import Xid
from tests.support.admin import ask_body
from tests.support.admin import connect as connect_remoting
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli

DEADLINE_S = 60.0
GROUP = "desk"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    # with so little that has to be free, how full this machine's disk is does not count
    flags = ("--ample-free-bytes", "0", "--clean-ratio", "1", "--force-ratio", "1", "--refuse-ratio", "1")
    with BrokerProcess(tmp_path_factory.mktemp("tx") / "data", *flags) as process:
        yield process
    shutil.rmtree(process.data)


@pytest.fixture
def session(broker: BrokerProcess) -> Iterator[XaSession]:
    with metaq.client.xa.connect(broker.address, qualifier="tests") as session:
        yield session


def prepare(session: XaSession, name: str, topic: str, *bodies: bytes) -> Xid:
    """A branch that its transaction manager leaves alone."""
    xid = session.xid(1, name, topic)
    session.tpc_begin(xid)
    for body in bodies:
        session.send(topic, body, tag="paid")
    session.tpc_prepare()
    session.leave()
    return xid


def bodies(cli: Cli, topic: str) -> list[str]:
    """Return the message bodies that readers see."""
    return cli.text("message", "tail", topic).splitlines()


def nothing_in(cli: Cli, topic: str) -> bool:
    return cli.run("message", "tail", topic, code=1).stdout == ""


def half(client: Client, topic: str, body: bytes) -> str:
    """A transactional message that its producer does not decide; the sender's id."""
    with client.transaction_producer(GROUP, lambda *_: Outcome.UNKNOWN, check=lambda _: Outcome.UNKNOWN) as producer:
        return producer.send(topic, body).sent.id


def branches_of(cli: Cli, topic: str) -> list[dict[str, object]]:
    """Branches that ``prepare`` has made for this topic."""
    return [row for row in cli.rows("tx", "list") if f":{topic.encode().hex()}:" in str(row.get("key"))]


def test_list_and_show(cli: Cli, session: XaSession) -> None:
    """MQ-071: what is prepared, since when, and its messages; the oldest first."""
    cli.run("topic", "create", "listed", "1")
    first, second = prepare(session, "first", "listed", b"one", b"two"), prepare(session, "second", "listed", b"three")
    found = branches_of(cli, "listed")
    assert [row["key"] for row in found] == [str(first), str(second)]
    assert [(row["broker"], row["state"], row["messages"]) for row in found] == [
        ("metaq", "prepared", 2),
        ("metaq", "prepared", 1),
    ]
    assert str(first) in cli.text("tx", "list")
    shown = cli.row("tx", "show", str(first))
    assert shown["since_ms"] == found[0]["since_ms"] and shown["age_s"] >= 0
    assert [(row["topic"], row["partition"], row["tag"], row["bytes"]) for row in shown["message_list"]] == [
        ("listed", 0, "paid", 3),
        ("listed", 0, "paid", 3),
    ]
    assert cli.run("tx", "list", "--count", "1").stderr.startswith("there may be more")
    assert nothing_in(cli, "listed")


def test_a_commit_shows_then_does(cli: Cli, session: XaSession) -> None:
    """MQ-107: against the rules, so with a warning; the transaction manager is told, and forgets."""
    cli.run("topic", "create", "forced", "1")
    xid = prepare(session, "one", "forced", b"one", b"two")
    preview = cli.run("tx", "commit", str(xid))
    assert preview.stdout == f"would commit {xid} on metaq: 2 messages\n"
    assert "heuristic" in preview.stderr and "--yes" in preview.stderr
    assert [row["state"] for row in branches_of(cli, "forced")] == ["prepared"]
    done = cli.run("tx", "commit", str(xid), "--yes")
    assert done.stdout == f"committed {xid} on metaq: 2 messages\n" and done.stderr == ""
    assert bodies(cli, "forced") == ["one", "two"]
    assert [row["state"] for row in branches_of(cli, "forced")] == ["heuristic commit"]
    with pytest.raises(XaFailed) as failed:
        session.tpc_rollback(xid)
    assert failed.value.code == XaCode.HEURCOM
    session.forget(xid)
    assert branches_of(cli, "forced") == []
    assert "no broker has" in cli.run("tx", "commit", str(xid), "--yes", code=1).stderr


def test_a_rollback_then_forget(cli: Cli, session: XaSession, broker: BrokerProcess) -> None:
    """MQ-107: in the place of a transaction manager that never comes; a decision outlives the broker."""
    cli.run("topic", "create", "dropped", "1")
    xid = prepare(session, "one", "dropped", b"one")
    assert "no operator has decided" in cli.run("tx", "forget", str(xid), "--yes", code=1).stderr
    (row,) = cli.rows("tx", "rollback", str(xid), "--yes")
    assert (row["action"], row["applied"], row["messages"]) == ("rollback", True, 1)
    for command in ("commit", "rollback"):
        assert "has already decided" in cli.run("tx", command, str(xid), "--yes", code=1).stderr
    session.close()
    broker.restart(same_port=True)
    wait_until(lambda: len(cli.rows("cluster", "brokers")) == 1, DEADLINE_S, "the broker is registered")
    assert [row["state"] for row in branches_of(cli, "dropped")] == ["heuristic rollback"]
    assert cli.row("tx", "show", str(xid))["message_list"] == []
    assert cli.text("tx", "forget", str(xid)) == f"would forget {xid} on metaq\n"
    assert cli.text("tx", "forget", str(xid), "--yes") == f"forgot {xid} on metaq\n"
    assert branches_of(cli, "dropped") == [] and nothing_in(cli, "dropped")


def test_pages(cli: Cli, session: XaSession, broker: BrokerProcess) -> None:
    """MQ-071: of a thousand at most, in the order of preparing; each branch once, also when others end meanwhile."""
    cli.run("topic", "create", "paged", "1")
    keys = [str(prepare(session, f"{number:02}", "paged", b"x")) for number in range(10)]
    with connect_remoting(broker) as remoting:
        before = ask_body(remoting, Request.LIST_TRANSACTIONS, state="prepared")
        start = next(number for number, row in enumerate(before["rows"]) if row["key"] == keys[0])
        page = ask_body(remoting, Request.LIST_TRANSACTIONS, state="prepared", limit=start + 4)
        assert [row["key"] for row in page["rows"]][start:] == keys[:4]
        for key in keys[:2]:
            cli.run("tx", "rollback", key, "--yes")
        rest = ask_body(remoting, Request.LIST_TRANSACTIONS, state="prepared", after=page["next"])
        assert [row["key"] for row in rest["rows"]] == keys[4:] and rest["next"] is None
        decided = ask_body(remoting, Request.LIST_TRANSACTIONS, state="heuristic", limit=1)
        more = ask_body(remoting, Request.LIST_TRANSACTIONS, state="heuristic", after=decided["next"])
        assert set(keys[:2]) <= {row["key"] for row in [*decided["rows"], *more["rows"]]}
        wrong = [{"state": "prepared", "limit": "0"}, {"state": "prepared", "limit": "501"}, {"state": "open"}, {}]
        for fields in wrong:
            assert remoting.call(Request.LIST_TRANSACTIONS, fields).code == Response.SYSTEM_ERROR
        for key, outcome in ((keys[5], "complete it"), ("TX:1-2-3:1", "commit"), ("nonsense", "commit")):
            answer = remoting.call(Request.DECIDE_TRANSACTION, {"key": key, "outcome": outcome})
            assert answer.code == Response.SYSTEM_ERROR
        absent = remoting.call(Request.DECIDE_TRANSACTION, {"key": "XID:1:ff:ff", "outcome": "commit"})
        assert absent.code == Response.QUERY_NOT_FOUND


def test_transactional_messages(cli: Cli, client: Client, broker: BrokerProcess) -> None:
    """RD-105: listed with who should decide; an operator decides like the producer."""
    cli.run("topic", "create", "sold", "1")
    ids = [half(client, "sold", body) for body in (b"one", b"two", b"three")]
    rows = [row for row in cli.rows("tx", "list") if row["kind"] == "half"]
    assert [row["id"] for row in rows] == ids
    assert [(row["topic"], row["group"], row["bytes"]) for row in rows] == [("sold", GROUP, size) for size in (3, 3, 5)]
    assert cli.row("tx", "show", rows[0]["offset_id"])["id"] == cli.row("tx", "show", ids[0])["id"] == ids[0]
    preview = cli.run("tx", "commit", ids[0])
    assert "producers" in preview.stderr and preview.stdout == f"would commit {ids[0]} on metaq: one message to sold\n"
    cli.run("tx", "commit", ids[0], "--yes")
    cli.run("tx", "rollback", rows[1]["offset_id"], "--yes")
    assert bodies(cli, "sold") == ["one"]
    assert [row["id"] for row in cli.rows("tx", "list") if row["kind"] == "half"] == ids[2:]
    assert "no broker has" in cli.run("tx", "rollback", ids[0], "--yes", code=1).stderr
    assert "no broker has" in cli.run("tx", "show", rows[0]["offset_id"], code=1).stderr
    numbers = cli.row("stats", "--broker", broker.address)
    assert [numbers[name] for name in ("half_undecided", "half_committed", "half_rolled_back")] == [1, 1, 1]


def test_numbers(cli: Cli, session: XaSession, broker: BrokerProcess) -> None:
    """MQ-107: what is open, prepared and decided by operators, and which commands came; in stats and for the doctor."""
    cli.run("topic", "create", "counted", "1")

    def numbers() -> dict[str, int]:
        return {name: value for name, value in cli.row("stats", "--broker", broker.address).items() if name.startswith("tx_")}

    before = numbers()
    prepare(session, "one", "counted", b"x")
    session.tpc_begin(session.xid(1, "two", "counted"))
    session.send("counted", b"y")
    after = numbers()
    changes = {name: after[name] - before[name] for name in ("tx_open", "tx_prepared", "tx_heuristic")}
    assert changes == {"tx_open": 1, "tx_prepared": 1, "tx_heuristic": 0}
    assert after["tx_open_bytes"] > before["tx_open_bytes"]
    session.tpc_rollback()
    last = numbers()
    assert last["tx_open_bytes"] == before["tx_open_bytes"]
    commands = {name: last[name] - before[name] for name in ("tx_begin", "tx_xa_begin", "tx_commit", "tx_rollback")}
    assert commands == {"tx_begin": 0, "tx_xa_begin": 2, "tx_commit": 0, "tx_rollback": 1}
    findings = {row["check"]: row["level"] for row in cli.rows("doctor", "--watch", "0", code=0)}
    assert findings["transactions"] == "ok"
