"""Recurring messages at a real broker: defined, replaced, ended, listed, over kills, restarts and retention."""

import json
import time
from base64 import b64encode
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.protocol.remoting.codes import Request, Response
from metaq.store.recovery.verify import verify
from tests.crash.timers import ControlledBroker
from tests.support.admin import Refused, ask, create_topic
from tests.support.broker import BrokerProcess, wait_until
from tests.support.messages import count, pairs_of, records, send, send_header, sent
from tests.support.metrics import value
from tests.support.remoting import RemotingClient

DEADLINE_S: Final = 60.0
TOPIC: Final = "later"
HOUR_MS: Final = 3_600_000


def cron(client: RemotingClient, do: str, **members: Any) -> dict[str, Any]:
    if "body" in members:
        members["body"] = b64encode(members["body"]).decode()
    answer = ask(client, Request.CRON, json.dumps({"do": do, **members}).encode())
    found: dict[str, Any] = json.loads(bytes(answer.body) or b"{}")
    return found


def define(client: RemotingClient, name: str, every: str, body: bytes = b"tick", **members: Any) -> int:
    create_topic(client, TOPIC)
    due_ms: int = cron(client, "define", name=name, cron=every, topic=TOPIC, body=body, **members)["due_ms"]
    return due_ms


def pending(client: RemotingClient) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    after = "0-0"
    while after:
        page = json.loads(bytes(ask(client, Request.LIST_TIMERS, json.dumps({"after": after, "limit": 2}).encode()).body))
        rows, after = rows + page["rows"], page["next"]
    return rows


def dues(client: RemotingClient) -> list[int]:
    """The times of the runs that were delivered."""
    return [int(pairs_of(record)["TIMER_OUT_MS"]) for record in records(client, TOPIC)]


def wait_count(client: RemotingClient, wanted: int) -> None:
    wait_until(lambda: count(client, TOPIC) >= wanted, DEADLINE_S, f"{wanted} messages are delivered")


@pytest.mark.slow
def test_it_comes_again_and_again_over_kills(tmp_path: Path) -> None:
    """E-13, T-11: each due time once, with one run pending; the name of the definition on each."""
    with BrokerProcess(tmp_path / "data") as broker:
        with RemotingClient(broker.host, broker.port) as client:
            first_ms = define(client, "beat", "@every 1s", attribute="t", missed="all")
            wait_count(client, 2)
        for _ in range(3):
            broker.kill()
            broker.start()
            with RemotingClient(broker.host, broker.port) as client:
                wait_count(client, count(client, TOPIC) + 1)
        with RemotingClient(broker.host, broker.port) as client:
            found = dues(client)
            assert found == [first_ms + 1000 * number for number in range(len(found))]
            record = records(client, TOPIC)[-1]
            assert bytes(record.body) == b"tick"
            pairs = pairs_of(record)
            assert pairs["TAGS"] == "t" and pairs["METAQ_CRON"].startswith("beat:")
            assert [row["recurring"] for row in pending(client)] == ["beat"]
            cron(client, "undefine", name="beat")
            assert pending(client) == [] and cron(client, "list")["rows"] == []
            over = count(client, TOPIC)
            with pytest.raises(Refused, match="no recurring message beat"):
                cron(client, "undefine", name="beat")
            time.sleep(1.2)  # longer than its interval: nothing may come
            assert count(client, TOPIC) == over
        assert broker.terminate() == 0
    assert not verify(tmp_path / "data").damages


def test_defining_again_replaces(tmp_path: Path) -> None:
    """E-13: one run is pending, of the new definition; also after the index is lost."""
    with BrokerProcess(tmp_path / "data") as broker:
        with RemotingClient(broker.host, broker.port) as client:
            define(client, "n", "0 0 1 1 *", b"old")
            define(client, "n", "@every 1d", b"new one", zone="Europe/Berlin", missed="none")
            define(client, "m", "@hourly")
            before = [(row["due_ms"], row["recurring"]) for row in pending(client)]
            assert sorted(name for _, name in before) == ["m", "n"]
            assert all(row["handle"] is None and row["topic"] == TOPIC for row in pending(client))
            (_, row) = cron(client, "list")["rows"]
            assert (row["name"], row["cron"], row["size"], row["missed"]) == ("n", "@every 1d", 7, "none")
        broker.kill()
        for path in (tmp_path / "data" / "timerindex").iterdir():
            path.unlink()
        broker.start()
        with RemotingClient(broker.host, broker.port) as client:
            assert [(row["due_ms"], row["recurring"]) for row in pending(client)] == before
            assert cron(client, "list", limit=1)["next"] == "m"
        broker.restart()
        with RemotingClient(broker.host, broker.port) as client:
            assert [(row["due_ms"], row["recurring"]) for row in pending(client)] == before
            assert json.loads(bytes(ask(client, Request.TIMER_STATS).body))["timers_recurring"] == 2


@pytest.mark.parametrize(("missed", "expected"), [("last", 1), ("all", 11), ("none", 0)])
def test_times_that_passed_while_nothing_ran(tmp_path: Path, missed: str, expected: int) -> None:
    """E-13: one message for all, one each, or none; then it goes on in step."""
    with ControlledBroker(tmp_path / "data") as broker:
        with RemotingClient(broker.host, broker.port) as client:
            due_ms = define(client, "n", "@every 1h", missed=missed)
        broker.kill()
        (tmp_path / "clock").write_text(str(11 * HOUR_MS + HOUR_MS // 2))
        broker.start()
        with RemotingClient(broker.host, broker.port) as client:
            wait_until(lambda: pending(client)[0]["due_ms"] > due_ms if pending(client) else False, DEADLINE_S, "it goes on")
            assert count(client, TOPIC) == expected
            assert dues(client) == [due_ms + HOUR_MS * number for number in range(expected)]
            assert [row["due_ms"] for row in pending(client)] == [due_ms + 11 * HOUR_MS]


def test_a_run_whose_topic_is_gone_is_dropped_and_the_next_comes(tmp_path: Path) -> None:
    """E-13: the definition goes on, and delivers once the topic is there again; the log has one line, and a metric all."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:

        def dropped() -> float:
            return value(broker, "metaq_recurring_dropped_total")

        def has_dropped(wanted: float) -> bool:
            return dropped() >= wanted

        def goes_on(times: int) -> bool:
            return broker.stderr().count("delivered again name=n") == times

        define(client, "n", "@every 1s")
        wait_count(client, 1)
        for number in (1, 2):
            ask(client, Request.DELETE_TOPIC_IN_BROKER, topic=TOPIC)
            wait_until(partial(has_dropped, dropped() + 2), DEADLINE_S, "two runs are dropped")
            assert broker.stderr().count("recurring message dropped name=n") == number
            create_topic(client, TOPIC)
            wait_until(partial(goes_on, number), DEADLINE_S, "one is delivered")
        assert len(pending(client)) == value(broker, "metaq_recurring") == 1


def features(broker: BrokerProcess) -> list[str]:
    found: list[str] = json.loads((broker.data / "store.json").read_text("utf-8")).get("features", [])
    return found


def test_the_folder_says_that_it_has_definitions(tmp_path: Path) -> None:
    """E-13: from the first one on, and again when the file was lost, so that no older version opens it."""
    with BrokerProcess(tmp_path / "data", "--sweep-interval-ms", "10") as broker:
        with RemotingClient(broker.host, broker.port) as client:
            sent(client, send(client, send_header("other", "TIMER_DELAY_MS\x01600000\x02"), b"x"))
            with pytest.raises(Refused):
                cron(client, "define", name="n", cron="@daily", topic="absent", body=b"")
            assert features(broker) == ["timers"]
            define(client, "n", "@daily")
            assert features(broker) == ["recurring", "timers"]
        assert broker.terminate() == 0
        for name in ("store.json", "store.json.bak"):
            (broker.data / name).unlink()
        broker.start()
        wait_until(lambda: features(broker) == ["recurring", "timers"], DEADLINE_S, "the new file says it again")


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"cron": "0 0 30 2 *"}, "never comes"),
        ({"zone": "Mars/Base"}, "does not know the time zone"),
        ({"name": "a b"}, "the name 'a b' is not of"),
        ({"name": ""}, "the name '' is not of"),
        ({"topic": "absent"}, "does not exist"),
        ({"topic": "METAQ_SYS_TIMERS"}, "no messages are sent to"),
        ({"partition": 9}, "partitions, none is 9"),
        ({"partition": "x"}, "partition is 'x', not a number"),
        ({"missed": "some"}, "not one of last, all, none"),
        ({"attribute": "a\x02b"}, "printable"),
        ({"body": "*"}, "not base64"),
        ({"body": b64encode(bytes(65_537)).decode()}, "longer than 65536"),
        ({"cron": None}, "cron is None, not a text"),
        ({"do": "explode"}, "not one of define, undefine, list"),
    ],
)
def test_what_cannot_be_defined(tmp_path: Path, members: dict[str, Any], sentence: str) -> None:
    """E-13: a sentence says why, and nothing is stored."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        create_topic(client, TOPIC)
        request = {"do": "define", "name": "n", "cron": "@daily", "topic": TOPIC, **members}
        with pytest.raises(Refused, match=sentence):
            ask(client, Request.CRON, json.dumps(request).encode())
        for body in (b"[]", b"{", b'{"do":[]}'):
            assert client.call(Request.CRON, {}, body).code != Response.SUCCESS
        assert pending(client) == [] and cron(client, "list")["rows"] == []


@pytest.mark.slow
def test_a_definition_outlives_its_segment(tmp_path: Path) -> None:
    """E-13, I-6: mark and run are stored again before retention deletes them, and are found without the index."""
    flags = {"segment-bytes": 262_144, "max-body-bytes": 65_536, "keep-hours": 1 / 3600, "checkpoint-interval-ms": 20}
    flags |= {"sweep-interval-ms": 20, "ample-free-bytes": 0, "retention-interval-ms": HOUR_MS}
    log = tmp_path / "data" / "commitlog"
    with BrokerProcess(tmp_path / "data", *(str(word) for name in flags for word in (f"--{name}", flags[name]))) as broker:
        with RemotingClient(broker.host, broker.port) as client:
            due_ms = define(client, "n", "@every 1d")
            first = min(path.name for path in log.iterdir())

            def is_deleted() -> bool:
                sent(client, send(client, send_header("other", ""), bytes(60_000)))
                ask(client, Request.DELETE_EXPIRED_COMMITLOG)
                return min(path.name for path in log.iterdir()) != first

            wait_until(is_deleted, DEADLINE_S, "its segment is deleted", pause_s=0.1)
        broker.kill()
        for path in (tmp_path / "data" / "timerindex").iterdir():
            path.unlink()
        broker.start()
        with RemotingClient(broker.host, broker.port) as client:
            assert [(row["due_ms"], row["recurring"]) for row in pending(client)] == [(due_ms, "n")]
            assert cron(client, "list")["rows"][0]["size"] == 4
            cron(client, "undefine", name="n")
            assert pending(client) == []
