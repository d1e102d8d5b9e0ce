"""Leases and dead letters by the API, compared with what the Python client and the command line say."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from metaq.client.admin.admin import Admin
from metaq.server.services.messages import WAIT_MS
from tests.server.console.operated import dead_letters
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, wait_until
from tests.support.cli import Cli
from tests.support.rest import JSON, ROOT, Rest, named
from tests.support.websocket import Subscriber

DEADLINE_S: Final = 60.0


# -- leases -----------------------------------------------------------------------------------------------------------


def test_leases_with_tags(rest: Rest, broker: BrokerProcess) -> None:
    """E-08, E-33: of two tags with the same hash, only the one that is wanted."""
    rest.put("/topics/l-tags", {"partitions": 1})
    for tag in ("BB", "Aa", "c"):
        rest.publish("l-tags", tag, tag=tag)
    leased = rest.post("/groups/l-tags/leases", {"topic": "l-tags", "limit": 9, "tags": "Aa || c"})["messages"]
    assert [one["message"]["body"] for one in leased] == ["Aa", "c"]
    with Subscriber(broker.http, "l-tags-2", "l-tags", tags="Aa || c", ready=9) as member:
        assert [member.taken()[0] for _ in range(2)] == ["Aa", "c"]


def test_leases(rest: Rest, admin: Admin, broker: BrokerProcess) -> None:
    """E-08: taken, finished, given back, extended; the same rows as the client's; a stale receipt is refused."""
    rest.put("/topics/l-topic", {"partitions": 1})
    rest.publish("l-topic", *"abc")
    path = "/groups/l-group/leases"
    leased = rest.post(path, {"topic": "l-topic", "limit": 3, "invisible_ms": 3_600_000})["messages"]
    assert [one["message"]["body"] for one in leased] == ["a", "b", "c"]
    receipts = [{"topic": "l-topic", "receipt": one["receipt"]} for one in leased]
    assert rest.post(f"{path}/ack", receipts[0]) == {"done": True}
    rest.post(f"{path}/nack", {**receipts[1], "delay_ms": 3_600_000})
    rest.post(f"{path}/extend", {**receipts[2], "invisible_ms": 7_200_000})
    rows = rest.all_rows(path)
    assert rows == [row._asdict() for row in admin.leases().partitions(broker.address, "l-group")]
    assert [(row["base"], row["in_flight"] + row["delayed"]) for row in rows] == [(1, 2)]
    opened = rest.get(f"{path}/l-topic/0")["rows"]
    views = list(admin.leases().messages(broker.address, "l-group", "l-topic", 0))
    assert [(row["times"], row["state"], row["first_ms"]) for row in opened] == [
        (view.times, view.state, view.first_ms) for view in views
    ]
    assert [row["ordinal"] for row in opened] == [1, 2]
    assert rest.post(path, {"topic": "l-topic", "wait_ms": 1})["messages"] == []
    lag = rest.get("/groups/l-group/lag")["partitions"][0]
    assert (lag["lag"], lag["in_flight"] + lag["delayed"]) == (2, 2)
    assert rest.refused(409, "POST", f"{path}/nack", receipts[0])["code"] in (13, 208)
    assert rest.refused(400, "POST", f"{path}/ack", {"topic": "l-topic", "receipt": "nonsense"})["code"] == 13


def test_who_has_left_is_given_nothing(rest: Rest, broker: BrokerProcess) -> None:
    """E-07: the wait ends with its connection; the next one who asks has the message at once."""

    def held(count: int) -> bool:
        return f"\nmetaq_held_pops {count}\n" in rest.send("GET", "/metrics").data.decode()

    rest.put("/topics/l-left", {"partitions": 1})
    path, data = "/groups/l-left/leases", json.dumps({"topic": "l-left", "wait_ms": WAIT_MS}).encode()
    host, _, port = broker.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SOCKET_TIMEOUT_S) as leaving:
        head = f"POST {ROOT}{path} HTTP/1.1\r\nHost: {broker.http}\r\nContent-Type: {JSON}\r\n"
        leaving.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: held(1), DEADLINE_S, "it waits")
        left_s = time.monotonic()
    wait_until(lambda: held(0), DEADLINE_S, "it has left", pause_s=0.05)
    assert time.monotonic() - left_s < WAIT_MS / 1000 - 1, "it waited to the end"
    rest.publish("l-left", "x")
    (leased,) = rest.post(path, {"topic": "l-left"})["messages"]
    assert (leased["message"]["body"], leased["message"]["deliveries"]) == ("x", 0)


# -- dead letters -----------------------------------------------------------------------------------------------------


def test_dead_letters(rest: Rest, cli: Cli) -> None:
    """E-09: the rows of ``metaq dlq``; sent again to the topic or the group; and discarded, once and for all."""
    rest.put("/topics/d-topic", {"partitions": 1})
    rest.publish("d-topic", "bad", tag="t", keys=["k"])
    path = "/groups/d-group"
    (leased,) = rest.post(f"{path}/leases", {"topic": "d-topic"})["messages"]
    rest.post(f"{path}/leases/nack", {"topic": "d-topic", "receipt": leased["receipt"], "reject": True})
    wait_until(lambda: rest.get(f"{path}/dead-letters")["end"] == 1, DEADLINE_S, "it is a dead letter")
    (letter,) = rest.get(f"{path}/dead-letters")["messages"]
    (row,) = cli.rows("dlq", "show", "d-group")
    assert (letter["id"], letter["topic"], letter["offset_id"]) == (row["id"], row["topic"], row["offset_id"])
    ids = [letter["offset_id"]]
    sent = rest.post(f"{path}/dead-letters/replay", {"offset_ids": [*ids, "00" * 16]})
    assert (sent["sent"], sent["letters"][1]["id"]) == (1, None)
    (again,) = [one for one in rest.get("/topics/d-topic/partitions/0/messages")["messages"] if one["offset"] == 1]
    assert (again["body"], again["tag"], again["id"]) == ("bad", "t", sent["letters"][0]["id"])
    assert again["keys"] == ["k", letter["id"]]
    assert again["properties"]["DLQ_ORIGIN_MESSAGE_ID"] == letter["id"]
    assert cli.row("dlq", "replay", "d-group")["sent_before"] == 1
    before = rest.get("/topics/d-topic")["messages"]
    assert rest.post(f"{path}/dead-letters/replay", {"offset_ids": ids * 2, "to": "group"})["sent"] == 1
    assert rest.get(f"/topics/{named('%RETRY%d-group')}")["messages"] == 1
    assert rest.get("/topics/d-topic")["messages"] == before
    assert rest.delete(f"{path}/dead-letters") == {"discarded": 1}
    assert rest.get(f"{path}/dead-letters")["messages"] == []
    cli.run("dlq", "show", "d-group", code=1)
    assert rest.delete(f"{path}/dead-letters") == {"discarded": 0}


def test_letters_that_were_all_discarded_stay_so(rest: Rest) -> None:
    """E-09: also when the group has a new one, behind those: they are neither sent again nor discarded again."""
    rest.put("/topics/d-emptied", {"partitions": 1})
    old = [letter["offset_id"] for letter in dead_letters(rest, "d-emptied", "d-emptied", ["a", "b"])]
    path = "/groups/d-emptied/dead-letters"
    assert rest.delete(path) == {"discarded": 2}
    rest.publish("d-emptied", "c")
    (leased,) = rest.post("/groups/d-emptied/leases", {"topic": "d-emptied"})["messages"]
    rest.post("/groups/d-emptied/leases/nack", {"topic": "d-emptied", "receipt": leased["receipt"], "reject": True})
    wait_until(lambda: rest.get("/groups/d-emptied")["dead_letters"] == 1, DEADLINE_S, "it is a dead letter")
    [new] = [letter["offset_id"] for letter in rest.get(path)["messages"]]
    before = rest.get("/topics/d-emptied")["messages"]
    done = rest.post(f"{path}/replay", {"offset_ids": [*old, new]})
    assert [letter["refused"] is None for letter in done["letters"]] == [False, False, True]
    assert "is no dead letter of the group" in done["letters"][0]["refused"]
    assert rest.get("/topics/d-emptied")["messages"] == before + 1
    assert rest.refused(404, "POST", f"{path}/discard", {"offset_ids": old})["code"] == 22
    assert rest.get("/groups/d-emptied")["dead_letters"] == 1


def test_two_replays_at_once(rest: Rest, broker: BrokerProcess) -> None:
    """E-09: of the same letters, to be discarded: each is sent by one of them, and the other one says so."""
    rest.put("/topics/d-twice", {"partitions": 1})
    ids = [letter["offset_id"] for letter in dead_letters(rest, "d-twice", "d-twice", list(map(str, range(64))))]

    def replay() -> int:
        with Rest(broker.http) as another:
            done = another.post("/groups/d-twice/dead-letters/replay", {"offset_ids": ids, "discard": True})
        assert done["not_discarded"] is None
        assert done["sent"] == sum(letter["refused"] is None for letter in done["letters"])
        return int(done["sent"])

    with ThreadPoolExecutor(4) as threads:
        sent = [each.result(DEADLINE_S) for each in [threads.submit(replay) for _ in range(4)]]
    assert sorted(sent) == [0, 0, 0, 64]
    assert rest.get("/topics/d-twice")["messages"] == 2 * 64
    assert rest.get("/groups/d-twice")["dead_letters"] == 0
