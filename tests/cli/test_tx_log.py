"""Undecided transactions in the log, on the command line: after retention, with damage, and of any size."""

import random
from pathlib import Path
from typing import Final

import pytest

import metaq.client.xa
from metaq.client import Outcome, connect
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.undecided import UndecidedState
from metaq.tx.xid import Xid
from tests.support.admin import ask, ask_body
from tests.support.admin import connect as connect_remoting
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli

DEADLINE_S: Final = 60.0
REFUSED: Final = 4
XID: Final = Xid(1, b"order", b"metaq", "shop")


def prepare(broker: BrokerProcess, *bodies: bytes) -> None:
    """A branch that nobody decides."""
    with metaq.client.xa.connect(broker.address, qualifier="shop") as session:
        session.tpc_begin(XID)
        for body in bodies:
            session.send("orders", body)
        session.tpc_prepare()
        session.leave()


def half(broker: BrokerProcess, *bodies: bytes) -> list[str]:
    """Transactional messages that nobody decides; the senders' ids."""
    with (
        connect(broker.registry) as client,
        client.transaction_producer("desk", lambda *_: Outcome.UNKNOWN, check=lambda _: Outcome.UNKNOWN) as producer,
    ):
        return [producer.send("orders", body).sent.id for body in bodies]


@pytest.mark.slow
def test_what_was_put_again_is_no_younger(tmp_path: Path) -> None:
    """MQ-107, RD-105: when the segment that it was in goes, an undecided transaction keeps its age and its names."""
    flags = ("--segment-bytes", "65536", "--max-body-bytes", "8192", "--check-after-ms", "3600000")
    with BrokerProcess(tmp_path / "data", *flags) as broker:
        cli = Cli(broker.registry)
        cli.run("topic", "create", "orders", "1")
        prepare(broker, b"one", b"two")
        half(broker, b"three")
        before = cli.rows("tx", "list")
        for _ in range(40):
            cli.run("put", "other", "x" * 8000, "--broker", broker.address)
        broker.terminate()
        broker.flags = (*flags, "--keep-hours", "0.00001")
        broker.restart(same_port=True)
        with connect_remoting(broker) as admin:

            def moved() -> bool:
                ask(admin, Request.DELETE_EXPIRED_COMMITLOG)
                return int(cli.row("stats", "--broker", broker.address)["log_begin"]) >= 65536

            wait_until(moved, DEADLINE_S, "the first segment is deleted")
        branch, message = cli.rows("tx", "list")
        assert [branch["key"], branch["since_ms"]] == [before[0]["key"], before[0]["since_ms"]]
        assert [message["id"], message["since_ms"]] == [before[1]["id"], before[1]["since_ms"]]
        assert message["offset_id"] != before[1]["offset_id"]
        assert cli.row("tx", "show", message["offset_id"])["id"] == message["id"]
        cli.run("tx", "commit", message["offset_id"], "--yes")
        cli.run("tx", "commit", branch["key"], "--yes")
        assert cli.text("message", "tail", "orders") == "three\none\ntwo\n"


def test_a_damaged_branch_can_be_rolled_back(tmp_path: Path) -> None:
    """MQ-107: it is listed, says what is wrong, and is never committed in part."""
    with BrokerProcess(tmp_path / "data") as broker:
        cli = Cli(broker.registry)
        cli.run("topic", "create", "orders", "1")
        prepare(broker, b"a whole body", b"a broken body")
        broker.terminate()
        (segment,) = [path for path in (tmp_path / "data" / "commitlog").iterdir() if b"a broken body" in path.read_bytes()]
        with segment.open("r+b") as log:
            log.seek(segment.read_bytes().index(b"a broken body"))
            log.write(b"A")
        broker.restart(same_port=True)
        (listed,) = cli.rows("tx", "list")
        assert (listed["key"], listed["messages"]) == (str(XID), 2)
        shown = cli.row("tx", "show", str(XID))
        assert shown["message_list"] == [] and "only 1 of 2 messages" in shown["problem"]
        assert "only be rolled back" in cli.run("tx", "show", str(XID)).stderr
        assert "metaq verify" in cli.run("tx", "commit", str(XID), "--yes", code=REFUSED).stderr
        assert [row["state"] for row in cli.rows("tx", "list")] == ["prepared"]
        cli.run("tx", "rollback", str(XID), "--yes")
        assert [row["state"] for row in cli.rows("tx", "list")] == ["heuristic rollback"]
        assert cli.run("message", "tail", "orders", code=1).stdout == ""


def test_pages_of_large_messages(tmp_path: Path) -> None:
    """RD-105: a page is full when it took some megabytes to make it; the next one goes on behind it."""
    chance = random.Random(7)  # clients compress what can be compressed
    bodies = [chance.randbytes(2_500_000) for _ in range(5)]
    with BrokerProcess(tmp_path / "data", "--max-message-bytes", "4194304") as broker:
        cli = Cli(broker.registry)
        cli.run("topic", "create", "orders", "1")
        ids = half(broker, *bodies)
        with connect_remoting(broker) as admin:
            first = ask_body(admin, Request.LIST_TRANSACTIONS, state=UndecidedState.HALF)
        assert len(first["rows"]) == 2 and first["next"] is not None
        assert [row["id"] for row in cli.rows("tx", "list")] == ids
        assert cli.row("tx", "show", ids[-1])["bytes"] == 2_500_000
