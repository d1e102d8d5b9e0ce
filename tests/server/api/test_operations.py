"""Each operation of the API once against a real broker, compared with what the Python client and the command line say."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.client import Client, connect
from metaq.client.admin.admin import Admin
from metaq.client.consuming.beginning import ConsumeFrom
from metaq.message import MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.adminbodies import decode_offsets
from metaq.protocol.remoting.codes import Request
from metaq.server.api.operations import OPERATIONS, Form
from tests.support.admin import ask
from tests.support.admin import connect as connect_java
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli
from tests.support.halves import GROUP as PRODUCERS
from tests.support.halves import NEVER, Producer
from tests.support.rest import Rest, named

DEADLINE_S: Final = 60.0
BROKER: Final = "metaq"
KEEP: Final = 71


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    return (*NEVER, "--keep-hours", str(KEEP))


# -- topics -----------------------------------------------------------------------------------------------------------


def test_topics(rest: Rest, admin: Admin) -> None:
    """E-32: made, changed, listed in pages, looked for and deleted, as the registry and the client see it."""
    made = rest.put("/topics/t-made", {"partitions": 3, "dedupe_window_ms": 5000})
    assert (made["partitions"], made["writable"], made["dedupe_window_ms"]) == (3, True, 5000)
    assert [(view.read_partitions, view.permission_text) for view in admin.topic_config("t-made")] == [(3, "RW")]
    assert rest.put("/topics/t-made", {"writable": False})["partitions"] == 3
    assert [view.permission_text for view in admin.topic_config("t-made")] == ["R-"]
    for number in range(4):
        rest.put(f"/topics/t-page-{number}", {"priority": number == 1})
    listed = rest.all_rows("/topics", search="t-page")
    assert [(row["topic"], row["priority"]) for row in listed] == [(f"t-page-{number}", number == 1) for number in range(4)]
    everything = {row["topic"] for row in rest.all_rows("/topics", system="true")}
    assert everything >= {view.topic for view in admin.all_topic_configs()} >= {"t-made", "BenchmarkTest"}
    assert rest.delete("/topics/t-made") == {"done": True}
    assert "t-made" not in {view.topic for view in admin.all_topic_configs()}
    for method, body in (("GET", None), ("DELETE", None)):
        assert rest.refused(404, method, "/topics/t-made", body)["code"] == 17


def test_partitions_that_take_no_more_messages_are_still_read(rest: Rest, admin: Admin) -> None:
    """E-32: unless that is asked for; a change of something else changes neither number, nor the type of messages."""

    def counts() -> tuple[int, int]:
        (view,) = admin.topic_config("t-drained")
        return view.write_partitions, view.read_partitions

    for body, then in (
        ({"partitions": 8}, (8, 8)),
        ({"partitions": 4}, (4, 8)),
        ({"partitions": 4, "priority": False}, (4, 8)),
        ({"dedupe_window_ms": 1000}, (4, 8)),
        ({"read_partitions": 4}, (4, 4)),
        ({"partitions": 6}, (6, 6)),
        ({"partitions": 2, "read_partitions": 2}, (2, 2)),
    ):
        rest.put("/topics/t-drained", body)
        assert counts() == then, body


def test_the_ends_of_partitions(rest: Rest, client: Client, admin: Admin) -> None:
    """E-32: as the client's."""
    rest.put("/topics/t-ends", {"partitions": 2})
    with client.producer() as producer:
        for _ in range(3):
            producer.send("t-ends", b"x")
    shown = rest.get("/topics/t-ends")
    views = admin.queues("t-ends")
    assert [(row["partition"], row["begin"], row["end"], row["updated_ms"]) for row in shown["ends"]] == [
        (view.queue.partition, view.begin, view.end, view.updated_ms) for view in sorted(views)
    ]
    assert shown["messages"] == 3


# -- messages ---------------------------------------------------------------------------------------------------------


def test_one_message_is_what_the_client_gets(rest: Rest, admin: Admin) -> None:
    """MY-032: with tag, keys and properties; found by key, by both ids, and where it was said to be."""
    rest.put("/topics/m-one", {"partitions": 3})
    given = {"body": "hällo", "tag": "paid", "keys": ["k-1", "k-2"], "properties": {"a": "b"}, "partition": 2}
    sent = rest.post("/topics/m-one/messages", given)
    assert (sent["partition"], sent["offset"], sent["status"], sent["handle"]) == (2, 0, "SEND_OK", None)
    (got,) = admin.query_by_key("m-one", "k-2")
    assert (got.body.decode(), got.tag, got.keys, got.properties["a"]) == ("hällo", "paid", ("k-1", "k-2"), "b")
    assert (got.id, got.offset_id, got.partition, got.queue_offset) == (sent["id"], sent["offset_id"], 2, 0)
    one = rest.get(f"/messages/{sent['offset_id']}")
    assert (one["body"], one["body_base64"], one["size"], one["stored_ms"]) == ("hällo", None, 6, got.store_ms)
    assert one["properties"] == dict(got.properties)
    assert rest.get("/topics/m-one/messages", key="k-1")["rows"] == [one]
    assert rest.get("/topics/m-one/messages", id=sent["id"])["rows"] == [one]
    assert rest.get("/topics/m-one/messages", key="k")["rows"] == []
    assert rest.get("/topics/m-one/partitions/2/messages")["messages"] == [one]
    assert rest.refused(404, "GET", f"/messages/{sent['offset_id'][:-4]}FFFF")["code"] == 22


def test_bytes_that_are_no_text(rest: Rest, client: Client) -> None:
    """MY-032: go and come in base64."""
    sent = rest.post("/topics/m-bytes/messages", {"body_base64": "/wD+"})
    assert rest.get(f"/messages/{sent['offset_id']}")["body_base64"] == "/wD+"
    with client.producer() as producer:
        offset_id = producer.send("m-bytes", b"\xff" * 300_000).offset_id
    large = rest.get(f"/messages/{offset_id}")
    assert (large["size"], large["cut"], large["body"]) == (300_000, True, None)
    for wrong in ({"body_base64": "%%"}, {"body": "x", "body_base64": "AA=="}):
        assert "base64" in rest.refused(400, "POST", "/topics/m-bytes/messages", wrong)["detail"]


def test_many_messages(rest: Rest, client: Client) -> None:
    """MY-032: in their order, those of one ordering key where the client's go; what is refused is said of each."""
    rest.put("/topics/m-many", {"partitions": 4})
    messages: list[dict[str, Any]] = [{"body": str(number), "ordering_key": "order-7"} for number in range(100)]
    done = rest.post("/topics/m-many/messages/many", {"messages": [*messages, {"body": "x", "partition": 4}]})
    assert (done["published"], done["refused"]) == (100, 1)
    assert "partition" in done["outcomes"][100]["refused"]["detail"]
    with client.producer() as producer:
        where = producer.send("m-many", b"from the client", ordering_key="order-7").queue.partition
    read = rest.get(f"/topics/m-many/partitions/{where}/messages", limit=256)
    assert [message["body"] for message in read["messages"]] == [*map(str, range(100)), "from the client"]
    assert (read["next"], read["begin"], read["end"]) == (101, 0, 101)


def test_reading_from_a_place_and_waiting(rest: Rest, broker: BrokerProcess) -> None:
    """E-32: from an offset, a time, by tag; a wait ends with the next message, or with nothing."""
    rest.put("/topics/m-read", {"partitions": 1})
    first, *_ = rest.publish("m-read", "0", "1", tag="a")
    time.sleep(0.002)
    rest.publish("m-read", "2", "3", tag="b")
    where = "/topics/m-read/partitions/0/messages"
    assert [one["body"] for one in rest.get(where, offset=1, limit=2)["messages"]] == ["1", "2"]
    assert [one["body"] for one in rest.get(where, tags="b")["messages"]] == ["2", "3"]
    stored_ms = rest.get(where, offset=2)["messages"][0]["stored_ms"]
    assert [one["body"] for one in rest.get(where, time_ms=stored_ms)["messages"]] == ["2", "3"]
    assert rest.get(where, offset=99)["next"] == 4
    assert rest.get(where, offset=4, wait_ms=1)["messages"] == []
    with Rest(broker.http) as waiting:
        waiting._connection.request("GET", f"/api/v1{where}?offset=4&wait_ms=20000")
        rest.publish("m-read", "4")
        assert b'"body":"4"' in waiting._connection.getresponse().read()
    assert first["partition"] == 0
    assert rest.refused(400, "GET", "/topics/m-read/partitions/1/messages")["code"] == 1


def test_an_id_is_stored_once(rest: Rest) -> None:
    """MY-032: within the window of its topic."""
    rest.put("/topics/m-once", {"partitions": 1, "dedupe_window_ms": 60_000})
    first, again = (rest.publish("m-once", "x", id="order-1")[0] for _ in range(2))
    assert first["offset_id"] == again["offset_id"]
    assert rest.get("/topics/m-once")["messages"] == 1


def test_a_priority_is_a_partition(rest: Rest) -> None:
    """MY-032: in a topic with priorities."""
    rest.put("/topics/m-urgent", {"partitions": 3, "priority": True})
    assert [sent["partition"] for level in (0, 2) for sent in rest.publish("m-urgent", "x", priority=level)] == [0, 2]


# -- timers -----------------------------------------------------------------------------------------------------------


def test_timers(rest: Rest, admin: Admin, broker: BrokerProcess, client: Client) -> None:
    """E-12: a delay and a time, the same rows as the client's, and cancelling by the handles of both."""
    due_ms = round((datetime.now(UTC) + timedelta(hours=1)).timestamp() * 1000)
    (late,) = rest.publish("timed", "x", deliver_at_ms=due_ms)
    (later,) = rest.publish("timed", "yy", delay_ms=7_200_000)
    with client.producer() as producer:
        handle = producer.send("timed", b"zzz", delay=timedelta(hours=3)).handle
    rows = rest.all_rows("/timers")
    assert rows == [row._asdict() for row in admin.timers().pending(broker.address)]
    assert [(row["topic"], row["size"]) for row in rows] == [("timed", 1), ("timed", 2), ("timed", 3)]
    assert (rows[0]["due_ms"], [row["handle"] for row in rows[:2]]) == (due_ms, [late["handle"], later["handle"]])
    for one in (late["handle"], later["handle"], handle):
        assert rest.delete(f"/timers/{one}") == {"done": True}
    assert rest.all_rows("/timers") == []
    (soon,) = rest.publish("timed", "soon", delay_ms=1)
    wait_until(lambda: rest.get("/topics/timed")["messages"] == 1, DEADLINE_S, "it is delivered")
    assert rest.refused(409, "DELETE", f"/timers/{soon['handle']}")["code"] == 604
    assert rest.refused(404, "DELETE", f"/timers/{soon['handle'].rpartition('-')[0]}-0123456789abcdef")["code"] == 604
    assert rest.refused(400, "DELETE", "/timers/nonsense")["code"] == 1


def test_the_longest_delay_is_that_of_the_broker(rest: Rest) -> None:
    """E-12: as by every other way: a year is none too many, and what is over max_delay_ms is refused by its name."""
    year_ms = 365 * 86_400_000
    (late,) = rest.publish("timed-long", "x", delay_ms=year_ms)
    assert rest.delete(f"/timers/{late['handle']}") == {"done": True}
    for delay_ms in (2 * year_ms, 10**17):
        refused = rest.refused(400, "POST", "/topics/timed-long/messages", {"body": "x", "delay_ms": delay_ms})
        assert (refused["code"], "max_delay_ms" in refused["detail"]) == (13, True), refused


def test_recurring_messages(rest: Rest, admin: Admin, broker: BrokerProcess) -> None:
    """E-13: defined, listed as the client lists them, and ended."""
    rest.put("/topics/jobs", {})
    for name, cron in (("nightly", "0 2 * * *"), ("weekly", "@weekly"), ("yearly", "@yearly")):
        rest.put(f"/recurring/{name}", {"cron": cron, "topic": "jobs", "body": "go"})
    rows = rest.all_rows("/recurring")
    assert rows == [row._asdict() for row in admin.timers().recurring(broker.address)]
    assert [row["name"] for row in rows] == ["nightly", "weekly", "yearly"]
    for row in rows:
        assert rest.delete(f"/recurring/{row['name']}") == {"done": True}
    assert rest.refused(404, "DELETE", "/recurring/nightly")["code"] == 604
    assert "MINUTE HOUR DAY" in rest.refused(400, "PUT", "/recurring/bad", {"cron": "often", "topic": "jobs"})["detail"]


# -- groups and leases ------------------------------------------------------------------------------------------------


def test_groups(rest: Rest, admin: Admin, client: Client) -> None:
    """E-32: made, changed, shown with members, lag as the client says, and deleted."""
    made = rest.put("/groups/g-made", {"retry_max_times": 3, "attributes": {"max_in_flight": "7"}})
    assert (made["retry_max_times"], made["attributes"], made["connected"]) == (3, {"max_in_flight": "7"}, [])
    (view,) = [group for group in admin.groups() if group.name == "g-made"]
    assert (view.retry_max_times, view.max_in_flight) == (3, 7)
    for _ in range(2):  # the second time it has the default already
        assert rest.put("/groups/g-made", {"attributes": {"max_in_flight": ""}})["attributes"] == {}
    assert "unknown" in rest.refused(400, "PUT", "/groups/g-made", {"attributes": {"unknown": ""}})["detail"]
    rest.put("/topics/g-topic", {"partitions": 2})
    rest.publish("g-topic", *"abcdef")
    with client.consumer("g-topic", "g-made") as consumer:
        wait_until(lambda: rest.get("/groups/g-made")["members"] == 1, DEADLINE_S, "the member is connected")
        (member,) = rest.get("/groups/g-made")["connected"]
        members = admin.members("g-made")
        assert members is not None
        assert [view.client_id for view in members.members] == [member["client_id"]]
        assert member["subscriptions"]["g-topic"] == "*"
        assert consumer is not None
    rest.post("/groups/g-made/offsets", {"topic": "g-topic", "offsets": {"0": 2, "1": 1}})
    lag = rest.get("/groups/g-made/lag", topic="g-topic")
    assert [(row["partition"], row["committed"], row["end"], row["lag"]) for row in lag["partitions"]] == [
        (view.queue.partition, view.committed, view.end, view.lag) for view in sorted(admin.group_lag("g-made", "g-topic"))
    ]
    assert lag["lag"] == 3
    assert "g-made" in rest.get("/topics/g-topic")["groups"]
    assert rest.put("/topics/g-topic", {"partitions": 2}) == rest.get("/topics/g-topic")
    assert [row["group"] for row in rest.all_rows("/groups", search="g-made")] == ["g-made"]
    assert rest.delete("/groups/g-made") == {"done": True}
    assert "g-made" not in [group.name for group in admin.groups()]
    assert rest.refused(404, "GET", "/groups/g-made/lag")["code"] == 26


def test_a_reset_is_shown_before_it_is_made(rest: Rest, admin: Admin) -> None:
    """E-04: the same changes as the client's, which the preview does not make."""
    rest.put("/topics/r-topic", {"partitions": 2})
    rest.publish("r-topic", *"abcd")
    rest.post("/groups/r-group/offsets", {"topic": "r-topic", "offsets": {"0": 2}})
    wanted = {"topic": "r-topic", "to": "first"}
    preview = rest.post("/groups/r-group/offsets/reset", wanted)
    assert preview["changes"] == [{"partition": 0, "before": 2, "after": 0}, {"partition": 1, "before": None, "after": 0}]
    assert not preview["applied"]
    assert admin.offsets("r-group", "r-topic")[MessageQueue("r-topic", BROKER, 0)] == 2
    rest.post("/groups/r-group/offsets/reset", {"topic": "r-topic", "offset": 1, "partitions": [0], "apply": True})
    rest.post("/groups/r-group/offsets/reset", {"topic": "r-topic", "to": "last", "partitions": [1], "apply": True})
    offsets = {queue.partition: offset for queue, offset in admin.offsets("r-group", "r-topic").items()}
    assert offsets == {0: 1, 1: 2}
    ahead_ms = round(time.time() * 1000) + 3_600_000
    assert [change["after"] for change in rest.post(
        "/groups/r-group/offsets/reset", {"topic": "r-topic", "time_ms": ahead_ms})["changes"]] == [2, 2]  # fmt: skip
    for wrong in ({}, {"to": "first", "offset": 1}, {"to": "first", "partitions": [2]}):
        rest.refused(400, "POST", "/groups/r-group/offsets/reset", {"topic": "r-topic", **wrong})


def test_members_are_told_of_a_reset_once(rest: Rest, admin: Admin, broker: BrokerProcess) -> None:
    """E-04: with all partitions at once. A Java member that is told of each one waits ten seconds each time."""
    rest.put("/topics/r-wide", {"partitions": 8})
    rest.publish("r-wide", *"abcdefghijklmnop")
    subscription = {"topic": "r-wide", "subString": "*", "subVersion": 1, "expressionType": "TAG"}
    consumer: dict[str, Any] = {"groupName": "r-members", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
    consumer |= {"consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [subscription]}
    path, fields = "/groups/r-members/offsets/reset", {"topic": "r-wide", "apply": True}

    with connect_java(broker) as member:

        def told() -> dict[int, int]:
            """Return what all requests name that have come before the answer to one more."""
            ask(member, Request.HEART_BEAT, beat)
            (request,) = [request for request in member.requests if request.code == Request.RESET_CONSUMER_CLIENT_OFFSET]
            member.requests.clear()
            return {queue.partition: offset for queue, offset in decode_offsets(request.body).items()}

        beat = fastjson.encode({"clientID": "java@1", "consumerDataSet": [consumer], "producerDataSet": []})
        ask(member, Request.HEART_BEAT, beat)
        assert rest.post(path, {**fields, "to": "last"})["changes"][7] == {"partition": 7, "before": None, "after": 2}
        assert told() == dict.fromkeys(range(8), 2)
        rest.post(path, {**fields, "time_ms": 1})
        assert told() == dict.fromkeys(range(8), 0)
        rest.post(path, {**fields, "offset": 1})
        assert told() == dict.fromkeys(range(8), 1)
        rest.post(path, {**fields, "to": "first", "partitions": [2, 5]})
        assert told() == {2: 0, 5: 0}
        admin.reset_offset("r-members", "r-wide", 2, apply=True)
        assert told() == dict.fromkeys(range(8), 2)
        admin.reset_offset("r-members", "r-wide", ConsumeFrom.FIRST, partitions=[6, 7], apply=True)
        assert told() == {6: 0, 7: 0}


# -- transactions -----------------------------------------------------------------------------------------------------


def test_transactions(rest: Rest, admin: Admin, broker: BrokerProcess) -> None:
    """E-32: half messages as the client lists them, and an operator's decision."""
    rest.put("/topics/orders", {"partitions": 1})
    with Producer(broker) as producer:
        begun = [producer.half(str(number).encode()) for number in range(3)]
    rows = rest.all_rows("/transactions", state="half")
    views = list(admin.transactions().halves(broker.address))
    assert [(row["key"], row["group"], row["since_ms"]) for row in rows] == [
        (view.offset_id, PRODUCERS, view.since_ms) for view in views
    ]
    assert [row["key"] for row in rows] == [one.offset_id for one in begun]
    assert rest.get(f"/transactions/{rows[0]['key']}")["topic"] == "orders"
    for row, outcome in zip(rows, ("commit", "rollback", "commit"), strict=True):
        assert rest.post(f"/transactions/{row['key']}/decision", {"outcome": outcome}) == {"done": True}
    wait_until(lambda: rest.get("/transactions", state="half")["rows"] == [], DEADLINE_S, "they are decided")
    assert [one["body"] for one in rest.get("/topics/orders/partitions/0/messages")["messages"]] == ["0", "2"]
    assert rest.refused(404, "GET", f"/transactions/{rows[0]['key']}")["code"] == 22
    assert rest.get("/transactions")["rows"] == []
    assert rest.refused(404, "POST", "/transactions/XID:1:0a:0b/decision", {"outcome": "commit"})["code"] == 22


# -- the broker -------------------------------------------------------------------------------------------------------


def test_the_broker(rest: Rest, admin: Admin, broker: BrokerProcess, client: Client) -> None:
    """E-29: its state, its settings with their origin, its connections; and a setting that changes."""
    state, info = rest.get("/broker"), admin.broker_info(broker.address)
    assert (state["broker"], state["role"], state["ready"], state["reasons"]) == (BROKER, "master", True, [])
    assert (state["address"], state["log_begin"]) == (broker.address, int(info["commitLogMinOffset"]))
    assert state["version"] == info["metaqVersion"]
    settings = {row["name"]: row for row in rest.get("/broker/settings")["rows"]}
    assert (settings["keep_hours"]["value"], settings["keep_hours"]["origin"]) == (KEEP, "--keep-hours")
    assert settings["max_topics"]["origin"] == "default"
    running = admin.broker_config(broker.address)
    assert str(settings["max_topics"]["value"]) == running["max_topics"]
    changed = {row["name"]: row for row in rest.ask("PATCH", "/broker/settings", {"keep_hours": 5}).content["rows"]}
    assert (changed["keep_hours"]["value"], changed["keep_hours"]["origin"]) == (5, "changed while it runs")
    assert admin.broker_config(broker.address)["fileReservedTime"] == "5"
    rest.refused(400, "PATCH", "/broker/settings", {})
    rest.put("/topics/b-topic", {})
    with client.consumer("b-topic", "connected"):
        wait_until(
            lambda: any(row["client_id"] for row in rest.get("/broker/connections")["rows"]), DEADLINE_S, "a client is shown"
        )
    assert rest.refused(404, "GET", "/broker/replicas")["code"] == 22
    assert rest.refused(400, "POST", "/broker/replicas/handover", {"replica": 2})["code"] == 3


def test_replicas(tmp_path: Path) -> None:
    """E-32: the state of a replica as the client has it; its API goes on when its role changes."""
    with BrokerProcess(tmp_path / "data", "--replication-listen", "127.0.0.1:0") as broker, Rest(broker.http) as rest:
        with connect(broker.registry) as client:
            view = client.admin().replicas().status(broker.address)
            assert view is not None
            shown = rest.get("/broker/replicas")
            assert (shown["role"], shown["replica"], shown["in_sync"]) == (view.role, view.replica, list(view.in_sync))
            assert (shown["replication"], shown["slaves"], shown["epoch"]) == (view.replication, [], view.epoch)
            assert "elected" in rest.refused(400, "POST", "/broker/replicas/handover", {"replica": 2})["detail"]
            rest.publish("kept", "x")
            client.admin().replicas().demote(broker.address, "127.0.0.1:9")

        def is_slave() -> bool:
            answer = rest.ask("GET", "/broker")
            return answer.status == 200 and answer.content["role"] == "slave"

        wait_until(is_slave, DEADLINE_S, "it is a slave")
        assert rest.refused(503, "POST", "/topics/kept/messages", {"body": "y"})["code"] == 14
        assert rest.get("/topics/kept")["messages"] == 1


def test_findings(rest: Rest) -> None:
    """E-04: a group whose messages wait while nobody consumes is found, and is not when it has them all."""
    rest.put("/topics/f-topic", {"partitions": 1})
    rest.publish("f-topic", "x")
    rest.post("/groups/f-group/offsets", {"topic": "f-topic", "offsets": {"0": 0}})

    def stuck() -> str:
        return "".join(row["found"] for row in rest.get("/broker/findings")["rows"] if row["check"] == "groups")

    others = [group["group"] for group in rest.get("/groups", limit=500)["rows"] if group["group"] != "f-group"]
    for name in others:
        rest.delete(f"/groups/{named(name)}")
    assert "f-group" in stuck()
    rest.post("/groups/f-group/offsets", {"topic": "f-topic", "offsets": {"0": 1}})
    assert "f-group" not in stuck()


def test_no_operation_is_left_out() -> None:
    """E-32: each has a test here or in a file beside, or streams (``test_streams``, ``test_subscription``)."""
    text = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for operation in OPERATIONS:
        last = operation.path.rpartition("/")[2] if not operation.path.endswith("}") else operation.path.split("/")[1]
        assert operation.takes.form is not Form.ROW or last in text, operation


# -- diagnosis --------------------------------------------------------------------------------------------------------


def test_the_newest_messages(rest: Rest) -> None:
    """E-32: of all partitions, by the time of storing, however they are spread; large ones, too."""
    rest.put("/topics/n-topic", {"partitions": 3})
    places = (0, 0, 1, 0, 2, 0, 0, 1)
    for number, partition in enumerate(places):
        rest.post("/topics/n-topic/messages", {"body": f"{number}", "partition": partition})
    assert rest.get("/topics/n-topic/newest", limit=1)["rows"][0]["body"] == "7"
    for most in (3, 8, 50):
        found = {row["body"] for row in rest.get("/topics/n-topic/newest", limit=most)["rows"]}
        assert found == {str(number) for number in range(max(0, 8 - most), 8)}, most
    rest.put("/topics/n-large", {"partitions": 1})
    for number in range(6):
        rest.post("/topics/n-large/messages", {"body": f"{number}" * 300_000})
    assert [row["body"][0] for row in rest.get("/topics/n-large/newest", limit=4)["rows"]] == ["5", "4", "3", "2"]
    assert rest.refused(404, "GET", "/topics/nothing/newest")["code"] == 17


def test_who_consumed_a_message(rest: Rest, client: Client, cli: Cli) -> None:
    """E-32: the same as `metaq message show` says, in each state."""
    rest.put("/topics/w-topic", {"partitions": 1})
    (sent,) = rest.publish("w-topic", "x", tag="a")
    for group in ("w-done", "w-late", "w-tags"):
        rest.put(f"/groups/{group}", {})
        offset = 0 if group == "w-late" else 1
        rest.post(f"/groups/{group}/offsets", {"topic": "w-topic", "offsets": {"0": offset}})
    with client.consumer("w-topic", "w-tags", tags="b"):
        wait_until(lambda: rest.get("/groups/w-tags")["members"] == 1, DEADLINE_S, "the member is connected")
        tracks = rest.get(f"/messages/{sent['offset_id']}/groups")["rows"]
        assert tracks == cli.row("message", "show", sent["id"], "--topic", "w-topic")["groups"]
    assert [(row["group"], row["state"].partition(":")[0]) for row in tracks] == [
        ("w-done", "consumed"),
        ("w-late", "not yet"),
        ("w-tags", "passed over"),
    ]
    page = rest.get(f"/messages/{sent['offset_id']}/groups", limit=2)
    assert [row["group"] for row in page["rows"]] == ["w-done", "w-late"] and page["next"] == "w-late"


def test_why_a_group_does_not_consume(rest: Rest, client: Client, cli: Cli) -> None:
    """E-32: the findings of `metaq why-not-consuming`, while nobody is connected, and while a member stands still."""
    rest.put("/topics/y-topic", {"partitions": 2})
    rest.put("/groups/y-group", {})
    rest.post("/groups/y-group/offsets", {"topic": "y-topic", "offsets": {"0": 0, "1": 0}})
    rest.publish("y-topic", *"abcd")
    alone = rest.get("/groups/y-group/diagnosis")
    assert alone["rows"] == cli.rows("why-not-consuming", "y-group", "--watch", "0", code=2)
    assert "no consumer is connected" in [row["found"] for row in alone["rows"]]
    with client.consumer("y-topic", "y-group") as consumer:
        wait_until(lambda: len(consumer.assignment()) >= 2, DEADLINE_S, "the member has both partitions")
        still = rest.get("/groups/y-group/diagnosis", topic="y-topic", watch_s=1)
    (progress,) = [row for row in still["rows"] if row["check"] == "progress"]
    assert (progress["level"], "did not move" in progress["found"], still["watched_s"] >= 1) == ("problem", True, True)
