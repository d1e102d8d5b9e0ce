"""Messages that are delayed to a time: by both protocols, delivered once and never early, cancelled, kept by retention."""

import base64
import json
import time
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.sysflag import TRANSACTION_TYPE
from tests.cluster.traffic import send_batch
from tests.support.broker import BrokerProcess, wait_until
from tests.support.halves import Producer
from tests.support.messages import count, pairs_of, records, send, send_header, sent
from tests.support.remoting import RemotingClient
from tests.support.talk import Talk

DEADLINE_S: Final = 60.0
TOPIC: Final = "later"
HOUR_MS: Final = 3_600_000
PARKED: Final = 150
"""Messages, more than a page has."""


def now_ms() -> int:
    return int(time.time() * 1000)


def delayed(client: RemotingClient, body: bytes, pairs: str, *, partition: int = 0) -> dict[str, str]:
    """Send a message with these properties; the fields of the answer."""
    return sent(client, send(client, send_header(TOPIC, pairs, partition=partition), body))


def recall(client: RemotingClient, handle: str, topic: str = TOPIC) -> tuple[int, str]:
    """Cancel; the code, and the id or the remark."""
    answer = client.call(Request.RECALL_MESSAGE, {"producerGroup": "pg", "topic": topic, "recallHandle": handle})
    return answer.code, answer.fields.get("msgId", answer.remark or "")


def wait_count(client: RemotingClient, wanted: int, partition: int = 0) -> None:
    wait_until(lambda: count(client, TOPIC, partition) >= wanted, DEADLINE_S, f"{wanted} messages are delivered")


def bodies(client: RemotingClient, partition: int = 0) -> list[bytes]:
    return [bytes(record.body) for record in records(client, TOPIC, partition)]


def test_a_message_comes_at_its_time_as_it_was_sent(tmp_path: Path) -> None:
    """ES-001, ES-005, ES-008, ES-014: in the order of the times, to the partition it was sent to, with its properties."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        asked = now_ms()
        delayed(client, b"third", "TIMER_DELAY_SEC\x012\x02TAGS\x01t\x02KEYS\x01k\x02UNIQ_KEY\x01U1\x02", partition=3)
        delayed(client, b"second", f"TIMER_DELIVER_MS\x01{asked + 1200}\x02", partition=3)
        answer = delayed(client, b"first", "TIMER_DELAY_MS\x01700\x02WAIT\x01true\x02", partition=3)
        assert (answer["queueId"], answer["queueOffset"]) == ("3", "0")
        delayed(client, b"now", f"__STARTDELIVERTIME\x01{asked - 5}\x02", partition=3)
        wait_count(client, 4, 3)
        now, *later = records(client, TOPIC, 3)
        found = {bytes(record.body): record for record in later}
        dues_ms = [int(pairs_of(record)["TIMER_OUT_MS"]) for record in later]
        assert bytes(now.body) == b"now" and found.keys() == {b"first", b"second", b"third"}
        assert dues_ms == sorted(dues_ms)  # on a busy machine sends may be further apart than what they ask for
        for body, delay_ms in ((b"first", 700), (b"second", 1200), (b"third", 2000)):
            assert asked + delay_ms <= int(pairs_of(found[body])["TIMER_OUT_MS"]) <= found[body].store_ms
        pairs = pairs_of(found[b"third"])
        enqueued, dequeued = int(pairs.pop("TIMER_ENQUEUE_MS")), int(pairs.pop("TIMER_DEQUEUE_MS"))
        assert asked <= enqueued <= dequeued <= found[b"third"].store_ms
        pairs.pop("TIMER_OUT_MS")
        assert pairs == {"TIMER_DELAY_SEC": "2", "TAGS": "t", "KEYS": "k", "UNIQ_KEY": "U1"}


def test_what_was_delayed_is_not_delayed_again(tmp_path: Path) -> None:
    """ES-001: a consumer may send on what it got, with all its properties."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        delayed(client, b"once", "TIMER_DELAY_MS\x01200\x02")
        wait_count(client, 1)
        pairs = "".join(f"{name}\x01{value}\x02" for name, value in pairs_of(records(client, TOPIC)[0]).items())
        answer = delayed(client, b"again", pairs)
        assert "recallHandle" not in answer and bodies(client) == [b"once", b"again"]


@pytest.mark.parametrize(
    "pairs",
    [
        "TIMER_DELAY_MS\x01soon\x02",
        "TIMER_DELAY_SEC\x01-1\x02",
        f"TIMER_DELAY_MS\x01{11 * HOUR_MS}\x02",
        f"TIMER_DELIVER_MS\x01{10**17}\x02",
        f"TIMER_DELAY_MS\x0110\x02a\x01{'x' * 32_650}\x02",
    ],
    ids=["no number", "negative", "longer than the limit", "in the far future", "no room for more properties"],
)
def test_what_a_time_cannot_be(tmp_path: Path, pairs: str) -> None:
    """ES-005: the producer learns at once what could never be delivered; 13 is not sent to another broker."""
    limit = ("--max-delay-ms", str(10 * HOUR_MS))
    with BrokerProcess(tmp_path / "data", *limit) as broker, RemotingClient(broker.host, broker.port) as client:
        answer = client.response(send(client, send_header(TOPIC, pairs), b"x"))
        assert answer.code == Response.MESSAGE_ILLEGAL, answer


def test_a_level_counts_before_a_time(tmp_path: Path) -> None:
    """ES-005: as RocketMQ has it."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        assert "recallHandle" not in delayed(client, b"level", f"TIMER_DELAY_MS\x01{HOUR_MS}\x02DELAY\x011\x02")
        wait_count(client, 1)


def test_neither_half_messages_nor_batches_are_delayed(tmp_path: Path) -> None:
    """ES-001: they are refused, and nothing of them is stored."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        pairs = "TRAN_MSG\x01true\x02PGROUP\x01pg\x02TIMER_DELAY_MS\x0110\x02"
        answer = client.response(send(client, send_header(TOPIC, pairs, sys_flag=TRANSACTION_TYPE), b"half"))
        assert answer.code == Response.MESSAGE_ILLEGAL and "use a delay level" in (answer.remark or "")
        send_batch(client, [b"not delayed"])
        with Producer(broker) as producer:
            producer.half(b"undecided")


def test_a_cancel_by_rocketmq_clients(tmp_path: Path) -> None:
    """ES-101, E-12: once, twice, too late, with another topic, a handle of nobody, and none at all."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        handle = delayed(client, b"never", "TIMER_DELAY_MS\x015000\x02UNIQ_KEY\x01U7\x02")["recallHandle"]
        late = delayed(client, b"comes", "TIMER_DELAY_MS\x01300\x02")["recallHandle"]
        version, topic, name, due, key, code = base64.urlsafe_b64decode(handle).decode().split(" ")
        assert (version, topic, name, key) == ("v1", TOPIC, "metaq", "U7")
        assert recall(client, handle, "other")[0] == Response.ILLEGAL_OPERATION
        forged = base64.urlsafe_b64encode(
            f"v1 {TOPIC} metaq 1 U7 {code[:-1]}{'0' if code[-1] != '0' else '1'}".encode()
        ).decode()
        assert recall(client, forged) == (Response.ILLEGAL_OPERATION, "the handle is not of this broker")
        assert recall(client, handle) == (Response.SUCCESS, "U7")
        assert recall(client, handle) == (Response.SUCCESS, "U7")
        assert recall(client, "nonsense")[0] == Response.ILLEGAL_OPERATION
        wait_count(client, 1)
        failed, remark = recall(client, late)
        assert failed == Response.ILLEGAL_OPERATION and "delivered" in remark
        delayed(client, b"after", f"TIMER_DELIVER_MS\x01{int(due) + 1}\x02")
        wait_count(client, 2)
        assert bodies(client) == [b"comes", b"after"]


@pytest.mark.parametrize(("key", "told"), [("a b ", "a b "), ("k" * 900, "")], ids=["with blanks", "long"])
@pytest.mark.parametrize("more", ["", "REAL_QID\x010\x02"], ids=["plain", "parsed"])
def test_a_handle_is_good_whatever_the_unique_key(tmp_path: Path, key: str, told: str, more: str) -> None:
    """ES-101, E-12: the broker takes every handle that it gives; one has no room for a long key."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        answer = delayed(client, b"never", f"TIMER_DELAY_MS\x01{HOUR_MS}\x02UNIQ_KEY\x01{key}\x02{more}")
        assert recall(client, answer["recallHandle"]) == (Response.SUCCESS, told)


def test_the_list_goes_on_after_a_cancel(tmp_path: Path) -> None:
    """ES-101: the index still has what was cancelled, which is on no page; all others are, each once."""
    with BrokerProcess(tmp_path / "data", "--sweep-interval-ms", "600000") as broker:
        with RemotingClient(broker.host, broker.port) as client:
            header = send_header(TOPIC, f"TIMER_DELAY_MS\x01{HOUR_MS}\x02")
            opaques = [send(client, header, b"x") for _ in range(PARKED)]
            handles = [sent(client, opaque)["recallHandle"] for opaque in opaques]
        broker.terminate()
        broker.restart(same_port=True)  # all of them enter the index, and the cancel does not
        with RemotingClient(broker.host, broker.port) as client:
            first = client.call(Request.LIST_TIMERS, body=b'{"limit":1}')
            assert recall(client, handles[0])[0] == Response.SUCCESS
            found = [row["id"] for row in listed(client)]
            assert len(found) == len(set(found)) == PARKED - 1
            assert json.loads(bytes(first.body))["rows"][0]["id"] not in found


def listed(client: RemotingClient) -> list[dict[str, Any]]:
    """The rows of all pages of 30050; every page but the last is full."""
    found: list[dict[str, Any]] = []
    following: str | None = "0-0"
    while following is not None:
        answer = client.call(Request.LIST_TIMERS, body=json.dumps({"after": following, "limit": 100}).encode())
        assert answer.code == Response.SUCCESS, answer.remark
        rows, following = itemgetter("rows", "next")(json.loads(bytes(answer.body)))
        assert len(rows) == 100 or following is None
        found += rows
    return found


def later(talk: Talk, body: bytes, option: str) -> tuple[int, str]:
    """Put with an option; the status, and the text of the answer."""
    return talk.ask(b"put %b 0 %d 0 %b 1\r\n%b" % (TOPIC.encode(), len(body), option.encode(), body))[0]


def test_a_person_delays_and_cancels(tmp_path: Path) -> None:
    """ES-001, ES-101: by the text protocol; mistakes get an answer that says what is wrong."""
    with BrokerProcess(tmp_path / "data") as broker, Talk(broker) as talk:
        code, text = later(talk, b"never", "delay=60000")
        _, partition, position, handle = text.split()
        assert (code, partition, position) == (200, "0", "-1")
        assert later(talk, b"at", f"at={now_ms() + 300}")[0] == 200
        assert later(talk, b"past", "at=1000")[1].split()[1:] == ["0", "0"]
        assert "delay 'soon' is not a decimal number" in later(talk, b"bad", "delay=soon")[1]
        assert later(talk, b"bad", "delay=-1")[0] == 400
        assert later(talk, b"bad", "delay=1 at=2") == (400, "put takes one of delay=MS and at=MS, not both")
        assert later(talk, b"bad", "delay=99999999999999")[0] == 400
        for _ in range(2):
            assert cancel(talk, handle) == (200, "cancelled")
        assert cancel(talk, "nonsense")[0] == 400
        assert cancel(talk, handle[:-16] + "0" * 16) == (404, "the handle is not of this broker")
        with RemotingClient(broker.host, broker.port) as client:
            wait_count(client, 2)
            assert bodies(client) == [b"past", b"at"]


def cancel(talk: Talk, handle: str) -> tuple[int, str]:
    """The status, and the text of the answer."""
    return talk.ask(b"cancel %b 2\r\n" % handle.encode())[0]


@pytest.mark.parametrize("engine", ["rocksdict", "sqlite3"])
@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_what_waits_survives_a_kill(tmp_path: Path, engine: str, durability: str) -> None:
    """ES-020, ES-101: each is delivered once, what was cancelled never, and a handle from before the kill is good after it."""
    flags = ("--timer-engine", engine)
    with BrokerProcess(tmp_path / "data", *flags, durability=durability) as broker:
        with RemotingClient(broker.host, broker.port) as client:
            handles = [delayed(client, b"%d" % number, "TIMER_DELAY_MS\x012500\x02")["recallHandle"] for number in range(8)]
            delayed(client, b"delivered before", "TIMER_DELAY_MS\x01100\x02")
            far = delayed(client, b"far", f"TIMER_DELAY_MS\x01{9 * HOUR_MS}\x02")["recallHandle"]
            assert recall(client, handles[3])[0] == Response.SUCCESS
            wait_count(client, 1)
        broker.kill()
        broker.start()
        with RemotingClient(broker.host, broker.port) as client:
            answer, reason = recall(client, handles[5])
            assert answer == Response.SUCCESS or "was delivered at its time" in reason  # where the start takes its 2.5 s
            assert recall(client, handles[3])[0] == Response.SUCCESS
            assert recall(client, far)[0] == Response.SUCCESS
            expected = [b"%d" % number for number in range(8) if number != 3 and (number != 5 or answer != Response.SUCCESS)]
            wait_count(client, 1 + len(expected))
        broker.restart(same_port=True)
        with RemotingClient(broker.host, broker.port) as client:
            delayed(client, b"last", "TIMER_DELAY_MS\x01100\x02")
            wait_count(client, 2 + len(expected))
            assert bodies(client) == [b"delivered before", *expected, b"last"]


def test_a_message_whose_topic_was_deleted_is_dropped(tmp_path: Path) -> None:
    """ES-008: it is reported, and those after it are delivered."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        sent(client, send(client, send_header("gone", "TIMER_DELAY_MS\x012000\x02"), b"lost"))
        delayed(client, b"kept", "TIMER_DELAY_MS\x012000\x02")
        answer = client.call(Request.DELETE_TOPIC_IN_BROKER, {"topic": "gone"})
        assert answer.code == Response.SUCCESS, answer
        wait_count(client, 1)
        assert "timer dropped" in broker.stderr() and bodies(client) == [b"kept"]


class WithoutRocks(BrokerProcess):
    program: ClassVar[tuple[str, ...]] = ("tests.support.norocks",)


def test_without_the_package_it_says_which_one(tmp_path: Path) -> None:
    """ES-006: other messages are taken, an older version may still open the folder, and the other engine needs no package."""
    with WithoutRocks(tmp_path / "data") as broker, Talk(broker) as talk:
        code, text = later(talk, b"refused", "delay=10")
        assert code == 500 and "needs the package rocksdict; pip install 'metaq-broker[timers]'" in text
        assert talk.put(TOPIC, b"taken")[0] == 200
        assert "features" not in json.loads((tmp_path / "data" / "store.json").read_text("utf-8"))
    with WithoutRocks(tmp_path / "data", "--timer-engine", "sqlite3") as broker, Talk(broker) as talk:
        assert later(talk, b"comes", "delay=10")[0] == 200
        wait_until(lambda: talk.bodies(TOPIC) == [b"taken", b"comes"], DEADLINE_S, "it is delivered")
        assert json.loads((tmp_path / "data" / "store.json").read_text("utf-8"))["features"] == ["timers"]
