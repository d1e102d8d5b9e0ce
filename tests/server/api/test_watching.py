"""What operators watch: the history, the log, the users, and dead letters one by one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.engine.figures.history import Figures
from metaq.engine.figures.statistics import SAMPLE_S
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli
from tests.support.metrics import Values
from tests.support.rest import Rest
from tests.support.users import ADMIN, READER, TOPIC, WRITER, write_users

DEADLINE_S: Final = 60.0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with users."""
    folder: Path = tmp_path_factory.mktemp("guarded")
    with BrokerProcess(folder / "data", "--users-file", str(write_users(folder / "users.yaml"))) as broker:
        yield broker


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker of one test: it has just started, and may be killed."""
    with BrokerProcess(tmp_path / "data") as broker:
        yield broker


# -- history ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_history_is_that_of_the_metrics(mortal: BrokerProcess) -> None:
    """E-32: rates times the time between samples are the counters of ``/metrics``, and the last values are its gauges."""
    with Rest(mortal.http) as rest:
        check_history(mortal, rest)


def check_history(broker: BrokerProcess, rest: Rest) -> None:
    """Publish before the first sample, and compare."""
    rest.put("/topics/h-topic", {"partitions": 1})
    bodies = [{"body": "x" * 100}] * 300
    rest.post("/topics/h-topic/messages/many", {"messages": bodies})
    rest.post("/groups/h-group/offsets", {"topic": "h-topic", "offsets": {"0": 100}})
    rest.publish("h-topic", "later", delay_ms=3_600_000)

    def sampled() -> dict[str, Any]:
        found: dict[str, Any] = rest.get("/broker/history", minutes=1)
        return found

    wait_until(lambda: sampled()["figures"]["lag"][-1:] == [200], DEADLINE_S, "the lag is in the history", 0.2)
    wait_until(lambda: rest.get("/groups/h-group/lag/history")["lag"] != [], DEADLINE_S, "the group is, too", 0.5)
    found, metrics = sampled(), Values(broker)
    figures = found["figures"]
    assert figures.keys() == set(Figures._fields)
    assert all(len(values) == len(found["times_ms"]) for values in figures.values())
    assert figures["lag"][-1] == metrics.get("metaq_consumer_lag_messages", {"group": "h-group", "topic": "h-topic"})
    assert figures["timers_pending"][-1] == metrics.get("metaq_timers_pending") == 1
    assert figures["disk_used_ratio"][-1] == pytest.approx(metrics.get("metaq_disk_used_ratio"), abs=0.05)
    assert figures["log_bytes"][-1] == pytest.approx(metrics.get("metaq_log_bytes"), rel=0.2)
    put = metrics.get("metaq_messages_in_total", {"topic": "h-topic"})
    assert sum(figures["put_per_second"]) * SAMPLE_S == pytest.approx(put, rel=0.3)
    assert sum(figures["put_bytes_per_second"]) * SAMPLE_S == pytest.approx(put * 100, rel=0.3)
    assert figures["longest_stall_seconds"][-1] > 0
    group = rest.get("/groups/h-group/lag/history")
    assert (group["group"], set(group["lag"])) == ("h-group", {200})
    assert rest.get("/groups/unknown/lag/history")["lag"] == []


def test_a_history_without_samples(rest: Rest) -> None:
    """E-32: of a broker that has just started is empty, and what asks for too much is refused."""
    assert rest.get("/broker/history", minutes=1, points=2)["figures"].keys() == set(Figures._fields)
    assert rest.refused(400, "GET", "/broker/history", minutes=361)["code"] == 1


# -- log --------------------------------------------------------------------------------------------------------------


def test_the_log_of_the_last_minutes(rest: Rest, broker: BrokerProcess) -> None:
    """E-19: the lines that went to standard error, in their order; by level, by words, and from a line on."""
    rest.put("/topics/l-topic", {})
    found = rest.get("/broker/logs")
    written = broker.stderr().splitlines()
    assert [f"{row['level'].upper()} {row['logger']} {row['text']}" for row in found["rows"]] == [
        line.partition(" ")[2] for line in written[: len(found["rows"])]
    ]
    assert [row["number"] for row in found["rows"]] == list(range(1, found["last"] + 1))
    (change,) = rest.get("/broker/logs", search="l-topic")["rows"]
    assert "api change" in change["text"]
    assert rest.get("/broker/logs", after=found["last"])["rows"] == []
    assert rest.get("/broker/logs", after=found["last"] - 1)["rows"] == found["rows"][-1:]
    assert rest.get("/broker/logs", limit=1)["rows"] == found["rows"][-1:]
    assert {row["level"] for row in rest.get("/broker/logs", level="warning")["rows"]} <= {"warning", "error"}


def test_the_log_is_for_administrators_and_has_no_secret(guarded: BrokerProcess) -> None:
    """E-05: lines name users; neither their secrets nor what was guessed is in them."""
    with Rest(guarded.http, ADMIN) as rest, Rest(guarded.http, READER) as reader, Rest(guarded.http, WRITER) as writer:
        for other in (reader, writer):
            assert other.refused(403, "GET", "/broker/logs")["code"] == 16
        guess = rest.send("GET", "/api/v1/topics", headers={"Authorization": "Bearer a-guess-of-a-secret"})
        assert guess.status == 401
        rest.put(f"/topics/{TOPIC}", {"partitions": 1})
        text = " ".join(row["text"] for row in rest.get("/broker/logs", limit=2000)["rows"])
    assert "login refused" in text
    assert f"user={ADMIN.name}" in text
    for secret in ("a-guess-of-a-secret", ADMIN.secret, READER.secret, WRITER.secret):
        assert secret not in text


def test_stacks(guarded: BrokerProcess) -> None:
    """MQ-111: for administrators."""
    with Rest(guarded.http, ADMIN) as admin, Rest(guarded.http, READER) as reader:
        assert "Greenlet" in admin.get("/broker/stacks")["text"]
        assert reader.refused(403, "GET", "/broker/stacks")["code"] == 16


# -- users ------------------------------------------------------------------------------------------------------------


def test_users_and_their_rights(guarded: BrokerProcess, rest: Rest) -> None:
    """E-05: for administrators, without secrets; without a users file there are none."""
    with Rest(guarded.http, ADMIN) as admin, Rest(guarded.http, READER) as reader:
        answer = admin.ask("GET", "/users")
        rows = {row["name"]: row for row in answer.content["rows"]}
        assert reader.refused(403, "GET", "/users")["code"] == 16
    assert rows.keys() == {ADMIN.name, READER.name, WRITER.name}
    assert (rows[ADMIN.name]["admin"], rows[READER.name]["admin"]) == (True, False)
    assert rows[READER.name] == {
        "name": READER.name,
        "admin": False,
        "proof": "secret",
        "topics": {"%DLQ%*": "SUB", TOPIC: "SUB"},
        "groups": {"g": "SUB"},
    }
    assert rows[WRITER.name]["topics"] == {TOPIC: "PUB|CREATE", "w-*": "PUB"}
    assert all(one.secret.encode() not in answer.data for one in (ADMIN, READER, WRITER))
    assert rest.get("/users") == {"rows": [], "next": None}


# -- dead letters, one by one -----------------------------------------------------------------------------------------


def dead_letters(rest: Rest, topic: str, group: str, number: int) -> list[dict[str, Any]]:
    """So many messages that a group has given up, as its dead letters."""
    rest.put(f"/topics/{topic}", {"partitions": 1})
    rest.publish(topic, *map(str, range(number)))
    path = f"/groups/{group}"
    for _ in range(number):
        (leased,) = rest.post(f"{path}/leases", {"topic": topic, "wait_ms": 5000})["messages"]
        rest.post(f"{path}/leases/nack", {"topic": topic, "receipt": leased["receipt"], "reject": True})
    wait_until(lambda: rest.get(f"{path}/dead-letters")["end"] == number, DEADLINE_S, "all are dead letters")
    letters: list[dict[str, Any]] = rest.get(f"{path}/dead-letters")["messages"]
    return letters


def test_some_letters_are_discarded(mortal: BrokerProcess) -> None:
    """E-09: those are neither shown nor counted nor sent again, whoever asks, and after a kill; the others are."""
    with Rest(mortal.http) as rest:
        left = discarded(mortal, rest)
    mortal.restart(same_port=True)
    with Rest(mortal.http) as again:
        path = "/groups/x-group/dead-letters"
        assert again.get(path)["messages"] == left
        assert again.delete(path) == {"discarded": 2}
        assert again.get(path)["messages"] == []


def discarded(broker: BrokerProcess, rest: Rest) -> list[dict[str, Any]]:
    """Discard three of five dead letters, and return the others."""
    letters = dead_letters(rest, "x-topic", "x-group", 5)
    path = "/groups/x-group/dead-letters"
    ids = [letter["offset_id"] for letter in letters]
    assert rest.post(f"{path}/discard", {"offset_ids": [ids[1], ids[2]]}) == {"discarded": 2}
    assert rest.post(f"{path}/discard", {"offset_ids": [ids[4]]}) == {"discarded": 1}
    left = [letters[0], letters[3]]
    assert rest.get(path)["messages"] == left
    assert rest.get(path, offset=1, limit=1)["messages"] == [letters[3]]
    assert rest.get("/groups/x-group")["dead_letters"] == 2
    assert [row["offset_id"] for row in Cli(broker.registry).rows("dlq", "show", "x-group")] == [ids[0], ids[3]]
    assert {row["group"]: row["messages"] for row in Cli(broker.registry).rows("dlq", "list")}["x-group"] == 2
    refused = rest.post(f"{path}/replay", {"offset_ids": [ids[1]]})
    assert (refused["sent"], "no dead letter" in refused["letters"][0]["refused"]) == (0, True)
    assert rest.refused(404, "POST", f"{path}/discard", {"offset_ids": [ids[1]]})["code"] == 22
    assert rest.refused(404, "POST", "/groups/y-group/dead-letters/discard", {"offset_ids": [ids[0]]})["code"] == 22
    return left


def test_who_only_reads_discards_nothing(guarded: BrokerProcess) -> None:
    """E-05: neither all dead letters nor one."""
    with Rest(guarded.http, ADMIN) as admin, Rest(guarded.http, READER) as reader:
        (letter,) = dead_letters(admin, TOPIC, "g", 1)
        path = "/groups/g/dead-letters"
        assert reader.get(path)["messages"] == [letter]
        assert reader.refused(403, "POST", f"{path}/discard", {"offset_ids": [letter["offset_id"]]})["code"] == 16
        assert admin.get(path)["messages"] == [letter]
