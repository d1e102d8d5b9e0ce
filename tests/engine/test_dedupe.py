"""Idempotent producers: a message whose id was stored within the window is answered as the first one, and stored once."""

import shutil
import time
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.ids import decode_offset_id
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import encode_request
from metaq.protocol.remoting.headers import SendMessage, encode_header, with_letters
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from metaq.protocol.sysflag import TRANSACTION_TYPE
from metaq.protocol.text.replies import OK
from tests.engine.test_timers import recall
from tests.support.broker import BrokerProcess, wait_until
from tests.support.halves import COMMIT, NEVER, ROLLBACK, Begun
from tests.support.messages import count, pairs_of, records, send, send_header, sent
from tests.support.metrics import value
from tests.support.remoting import RemotingClient
from tests.support.slowdisk import Controlled
from tests.support.talk import Talk

TOPIC: Final = "once"
WINDOW_MS: Final = 600_000
DEADLINE_S: Final = 60.0
MANY: Final = 8000
"""As many sends at once as do not fit one turn of the loop."""
NEW: Final = 3000
ENGINES: Final = pytest.mark.parametrize("engine", ["rocksdict", "sqlite3"])


def create(client: RemotingClient, topic: str = TOPIC, window_ms: int = WINDOW_MS) -> None:
    fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": "4", "writeQueueNums": "4", "perm": "6"}
    fields |= {"topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false"}
    fields["attributes"] = f"+dedupe.window.ms={window_ms}"
    answer = client.call(Request.UPDATE_AND_CREATE_TOPIC, fields)
    assert answer.code == Response.SUCCESS, answer.remark


def put(client: RemotingClient, ident: str, body: bytes = b"x", *, partition: int = 0, more: str = "") -> dict[str, str]:
    """Send a message with an id; the fields of the answer."""
    return sent_when_ready(client, send_header(TOPIC, f"UNIQ_KEY\x01{ident}\x02{more}", partition=partition), body)


def sent_when_ready(
    client: RemotingClient, header: SendMessage, body: bytes, code: int = Request.SEND_MESSAGE_V2
) -> dict[str, str]:
    """Send until the broker has read the ids of before its start; the fields of the answer."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        answer = client.response(send(client, header, body, code))
        if answer.code == Response.SUCCESS:
            return answer.fields
        assert answer.code == Response.SYSTEM_BUSY and time.monotonic() < deadline, answer.remark
        time.sleep(0.01)


@ENGINES
def test_a_message_is_stored_once_over_kills_and_restarts(tmp_path: Path, engine: str) -> None:
    """E-07, D-1, D-2: whatever the partition and the body; other ids, and topics without a window, are not concerned."""
    flags = ("--timer-engine", engine, "--checkpoint-interval-ms", "50", "--sweep-interval-ms", "10")
    with BrokerProcess(tmp_path / "data", *flags) as broker:
        with RemotingClient(broker.host, broker.port) as client:
            create(client)
            first = {ident: put(client, ident, partition=2) for ident in ("a", "b", "c")}
            assert len({fields["msgId"] for fields in first.values()}) == 3
            assert first["a"]["queueId"] == "2"
            assert {ident: put(client, ident, b"other", partition=1) for ident in first} == first
            header = send_header("free", "UNIQ_KEY\x01a\x02")
            assert len({sent(client, send(client, header, b"x"))["msgId"] for _ in range(2)}) == 2
        for end in (broker.kill, broker.terminate, broker.kill):
            end()
            broker.restart(same_port=True)
            with RemotingClient(broker.host, broker.port) as client:
                assert {ident: put(client, ident, partition=3) for ident in first} == first
                first[f"new {len(first)}"] = put(client, f"new {len(first)}", partition=2)
        with RemotingClient(broker.host, broker.port) as client:
            assert [count(client, TOPIC, partition) for partition in range(4)] == [0, 0, 6, 0]


def test_many_at_once_are_each_stored_once(tmp_path: Path) -> None:
    """D-1: in one turn, in the turns after it, with a property of their own."""
    with BrokerProcess(tmp_path / "data", durability="disk") as broker, RemotingClient(broker.host, broker.port) as client:
        create(client)
        headers = [send_header(TOPIC, f"UNIQ_KEY\x01u{n}\x02DEDUPE_ID\x01{n % 50}\x02") for n in range(400)]
        opaques = [send(client, header, b"x") for header in headers]
        answers = [sent(client, opaque) for opaque in opaques]
        assert answers == answers[:50] * 8
        assert count(client, TOPIC) == 50


@ENGINES
def test_what_waits_for_the_index_keeps_its_order(tmp_path: Path, engine: str) -> None:
    """D-1, D-2: after a restart the index is asked for the known ids, and new ones come between them, all at once."""
    flags = ("--timer-engine", engine, "--checkpoint-interval-ms", "50", "--sweep-interval-ms", "10")
    with BrokerProcess(tmp_path / "data", *flags) as broker:
        with RemotingClient(broker.host, broker.port) as client:
            create(client)
            first = [put(client, f"known {number}") for number in range(20)]
        broker.terminate()
        broker.restart(same_port=True)
        with RemotingClient(broker.host, broker.port) as client:
            assert put(client, "known 0") == first[0]
            ids = [f"known {n % 20}" if n % 2 else f"new {n % (2 * NEW)}" for n in range(MANY)]
            opaques = [send(client, send_header(TOPIC, f"UNIQ_KEY\x01{each}\x02"), b"x") for each in ids]
            answers = [sent(client, opaque) for opaque in opaques]
            assert answers[1::2] == [first[number % 20] for number in range(1, MANY, 2)]
            assert [int(answer["queueOffset"]) for answer in answers[0::2]] == [20 + n % NEW for n in range(MANY // 2)]
            assert count(client, TOPIC) == 20 + NEW


def test_batches_halves_and_delayed_ones(tmp_path: Path) -> None:
    """E-07: a batch by its first message, a half by itself, a delayed message by what waits; its copy is none."""
    with BrokerProcess(tmp_path / "data", "--sweep-interval-ms", "10") as broker:
        answers: list[list[dict[str, str]]] = []
        for _ in range(2):
            with RemotingClient(broker.host, broker.port) as client:
                if not answers:
                    create(client)
                items = [BatchItem(0, b"1", "UNIQ_KEY\x01b1\x02"), BatchItem(0, b"22", "UNIQ_KEY\x01b2\x02")]
                header = send_header(TOPIC)._replace(batch=True)
                batch = sent_when_ready(client, header, encode_batch(items), Request.SEND_BATCH_MESSAGE)
                half = send_header(TOPIC, "UNIQ_KEY\x01h\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02", sys_flag=TRANSACTION_TYPE)
                halved = sent_when_ready(client, half, b"half")
                level = put(client, "l", more="DELAY\x011\x02")
                timer = put(client, "t", more="TIMER_DELAY_MS\x01300\x02", partition=1)
                answers.append([batch, halved, level, timer, put(client, "b2")])
                wait_until(lambda: count(client, TOPIC, 1) == 1, DEADLINE_S, "the delayed message is delivered")
                assert put(client, "t", partition=1)["msgId"] == timer["msgId"]
            broker.restart(same_port=True)
        assert answers[0] == answers[1]
        batch, halved, _, timer, second = answers[0]
        assert batch["msgId"].split(",")[1] == second["msgId"] and "recallHandle" in timer and halved["transactionId"] == "h"
        with RemotingClient(broker.host, broker.port) as client:
            wait_until(lambda: count(client, TOPIC) == 3, DEADLINE_S, "the message of level 1 is delivered")
            assert count(client, TOPIC, 1) == 1
            copy = "".join(f"{name}\x01{value}\x02" for name, value in pairs_of(records(client, TOPIC, 1)[0]).items())
            sent(client, send(client, send_header(TOPIC, copy, partition=1), b"on its way again"))
            assert count(client, TOPIC, 1) == 2


def half_header(ident: str, more: str = "") -> SendMessage:
    pairs = f"UNIQ_KEY\x01{ident}\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02{more}"
    return send_header(TOPIC, pairs, sys_flag=TRANSACTION_TYPE)


def half_of(client: RemotingClient, ident: str, more: str = "") -> dict[str, str]:
    """Send a half message; the fields of the answer."""
    return sent_when_ready(client, half_header(ident, more), b"half")


def half_request(opaque: int, header: SendMessage) -> bytes:
    return encode_request(Request.SEND_MESSAGE_V2, opaque, with_letters(encode_header(header)), b"half")


def decide(client: RemotingClient, half: dict[str, str], decision: int) -> None:
    place = decode_offset_id(half["msgId"]).log_offset
    header = Begun(int(half["queueOffset"]), place, half["transactionId"], half["msgId"]).end(decision)
    assert client.call(Request.END_TRANSACTION, encode_header(header)).code == Response.SUCCESS


@ENGINES
def test_what_was_cancelled_or_rolled_back_is_stored_when_it_is_sent_again(tmp_path: Path, engine: str) -> None:
    """E-07: at once, after a kill, and when the index is made from the log; then the id is that of the later message."""
    flags = ("--timer-engine", engine, "--checkpoint-interval-ms", "50", "--sweep-interval-ms", "10")
    with BrokerProcess(tmp_path / "data", *flags, *NEVER) as broker:
        known: list[dict[str, str]] = []
        for when in ("first", "at once", "after a kill", "from the log"):
            if known:
                with RemotingClient(broker.host, broker.port) as client:
                    timer, half = known
                    assert recall(client, timer["recallHandle"], TOPIC) == (Response.SUCCESS, "t")
                    decide(client, half, ROLLBACK)
            if when == "after a kill":
                broker.kill()
                broker.restart(same_port=True)
            elif when == "from the log":
                broker.terminate()
                shutil.rmtree(broker.data / "dedupeindex")
                broker.restart(same_port=True)
            with RemotingClient(broker.host, broker.port) as client:
                if not known:
                    create(client)
                latest = [put(client, "t", more="TIMER_DELAY_MS\x0160000\x02"), half_of(client, "h")]
                assert [put(client, "t", more="TIMER_DELAY_MS\x0160000\x02"), half_of(client, "h")] == latest
                assert all(before["msgId"] != after["msgId"] for before, after in zip(known, latest, strict=False)), when
                known = latest
        broker.kill()
        broker.restart(same_port=True)
        with RemotingClient(broker.host, broker.port) as client:
            assert [put(client, "t"), half_of(client, "h")] == known
            decide(client, known[1], COMMIT)
            assert half_of(client, "h") == known[1]
            wait_until(lambda: count(client, TOPIC) == 1, DEADLINE_S, "the committed message")


@pytest.mark.parametrize("cold", [False, True])
def test_another_transaction_with_the_id_of_an_undecided_one_is_refused(tmp_path: Path, *, cold: bool) -> None:
    """D-1, RD-105: answered as the first one it could not be decided, and the message of a committed transaction were lost."""
    with Controlled(tmp_path / "data", *NEVER) as broker, RemotingClient(broker.host, broker.port) as client:
        create(client)
        same = "DEDUPE_ID\x01d\x02"
        first = half_of(client, "u1", same)
        if cold:
            (tmp_path / "cold").touch()
        assert half_of(client, "u1", same) == first
        refused = client.response(send(client, half_header("u2", same), b"half"))
        assert refused.code == Response.MESSAGE_ILLEGAL
        assert "first message with the DEDUPE_ID 'd' is undecided; send this one again" in (refused.remark or "")
        decide(client, first, ROLLBACK)
        second = half_of(client, "u2", same)
        assert second["msgId"] != first["msgId"]
        decide(client, second, COMMIT)
        assert half_of(client, "u3", same)["msgId"] == second["msgId"]
        assert count(client, TOPIC) == 1


def test_a_half_that_is_sent_twice_in_one_turn_is_answered_as_the_first(tmp_path: Path) -> None:
    """D-1: the first one is only staged then, and not there to be read; another transaction is refused all the same."""
    with BrokerProcess(tmp_path / "data", *NEVER) as broker, RemotingClient(broker.host, broker.port) as client:
        create(client)
        half_of(client, "ready")
        for turn in range(2):
            same = f"DEDUPE_ID\x01d{turn}\x02"
            headers = [half_header(f"{name}{turn}", same) for name in ("u1", "u1", "u2", "u1")]
            opaques = range(1000 + 4 * turn, 1004 + 4 * turn)
            client.send_bytes(b"".join(map(half_request, opaques, headers)))
            first, again, other, last = map(client.response, opaques)
            assert first.code == Response.SUCCESS
            assert again.fields == last.fields == first.fields
            assert other.code == Response.MESSAGE_ILLEGAL
            decide(client, first.fields, COMMIT)
        assert count(client, TOPIC) == 2


def test_a_window_ends_and_a_new_topic_knows_nothing(tmp_path: Path) -> None:
    """D-2: after two windows an id may come again; so may one whose message was in a topic that was deleted."""
    flags = ("--checkpoint-interval-ms", "50")
    with BrokerProcess(tmp_path / "data", *flags) as broker, RemotingClient(broker.host, broker.port) as client:
        create(client, window_ms=200)
        first = put(client, "a")
        wait_until(lambda: put(client, "a") != first, DEADLINE_S, "the window is over", pause_s=0.25)
        create(client)
        again = put(client, "a")
        assert put(client, "a") == again
        assert client.call(Request.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC}).code == Response.SUCCESS
        create(client)
        assert put(client, "a") != again


@ENGINES
def test_the_metrics_count_duplicates_and_the_index(tmp_path: Path, engine: str) -> None:
    """E-01, E-07: nothing before the first window; then what was not stored, and what the index has and lacks."""
    flags = ("--timer-engine", engine, "--checkpoint-interval-ms", "50", "--sweep-interval-ms", "10")
    with BrokerProcess(tmp_path / "data", *flags) as broker, RemotingClient(broker.host, broker.port) as client:
        names = ("metaq_duplicates_total", "metaq_dedupe_waiting", "metaq_dedupe_behind_bytes", "metaq_dedupe_index_bytes")
        sent(client, send(client, send_header("free", "UNIQ_KEY\x01a\x02"), b"x"))
        assert [value(broker, name) for name in names] == [0, 0, 0, 0]
        create(client)
        for ident in ("a", "b", "a", "a"):
            put(client, ident)
        assert value(broker, "metaq_duplicates_total") == 2
        wait_until(lambda: value(broker, "metaq_dedupe_waiting") == 0, DEADLINE_S, "the ids are in the index")
        wait_until(lambda: value(broker, "metaq_dedupe_behind_bytes") == 0, DEADLINE_S, "the index covers the log")
        wait_until(lambda: value(broker, "metaq_dedupe_index_bytes") > 0, DEADLINE_S, "the index is on the disk")


def test_a_duplicate_is_counted_once(tmp_path: Path) -> None:
    """E-01: when it is answered, however often its id was looked for; a message that is refused is none."""
    with BrokerProcess(tmp_path / "data", *NEVER) as broker, RemotingClient(broker.host, broker.port) as client:
        create(client)
        items = [BatchItem(0, b"1", "UNIQ_KEY\x01b1\x02"), BatchItem(0, b"22", "UNIQ_KEY\x01b2\x02")]
        header, same = send_header(TOPIC)._replace(batch=True), "DEDUPE_ID\x01d\x02"
        put(client, "t", more="TIMER_DELAY_MS\x0160000\x02")
        sent(client, send(client, header, encode_batch(items), Request.SEND_BATCH_MESSAGE))
        half_of(client, "u1", same)
        assert value(broker, "metaq_duplicates_total") == 0
        put(client, "t")
        assert value(broker, "metaq_duplicates_total") == 1
        sent(client, send(client, header, encode_batch(items), Request.SEND_BATCH_MESSAGE))
        assert value(broker, "metaq_duplicates_total") == 3
        refused = client.response(send(client, half_header("u2", same), b"half"))
        assert refused.code == Response.MESSAGE_ILLEGAL
        assert value(broker, "metaq_duplicates_total") == 3
        half_of(client, "u1", same)
        assert value(broker, "metaq_duplicates_total") == 4
        with Talk(broker) as talk:
            assert talk.ask(b"put once 1 1 0 id=t 1\r\nx")[0][0] == OK
        assert value(broker, "metaq_duplicates_total") == 5
