"""``put`` with options: what is stored and answered, without sockets (``tests.support.inprocess``)."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import gevent
import pytest

from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.tables.topics import Topic
from metaq.engine.timers.cancelling import Cancels
from metaq.engine.timers.timers import Timers
from metaq.errors import Fenced
from metaq.protocol.properties import DEDUPE_ID, PRIORITY, SHARDING_KEY, TIMER_OUT
from metaq.protocol.record import TAGS, decode_properties, decode_record, java_hash
from metaq.protocol.text.commands import Create, Get
from metaq.protocol.text.messages import EPOCH_SHIFT
from metaq.server.text.admin import AdminHandler
from metaq.server.text.get import GetHandler
from metaq.server.text.later import LaterHandler
from metaq.server.text.put import PutHandler
from metaq.store.files.filecache import run_here
from tests.support.broker import wait_until
from tests.support.inprocess import Parts, Text

DEADLINE_S: Final = 30.0
PUT: Final = b"put orders 0 4 0"
WINDOW_MS: Final = 60_000
TOPICS: Final = {"orders": {"partitions": 2}, "payments": {"partitions": 2, "dedupe_window_ms": WINDOW_MS}}


@contextmanager
def serving(data: Path, **settings: Any) -> Iterator[Parts]:
    """Stand for a master that serves the messages in a folder."""
    parts = Parts(data, topics=TOPICS, **{"auto_create_topics": False, **settings})
    gets = GetHandler(parts.context, parts.holds, parts.reads, parts.loop)
    puts = PutHandler(parts.context, parts.turns)
    timers = Timers(parts.context, parts.turns, run_here)
    dedupe = Dedupe(parts.context, parts.turns, timers.parked_handle, run_here)
    parts.context.topics.changed = dedupe.topic_changed
    dedupe.start()

    def knows_ids() -> bool:
        gevent.sleep(0)
        return dedupe.numbers()["dedupe_index"] == "yes"

    wait_until(knows_ids, DEADLINE_S, "the log is read for ids")
    later = LaterHandler(parts.context, puts, timers, Cancels(timers, dedupe, run_here), dedupe)
    admin = AdminHandler(parts.context, parts.endpoint, lambda: None, lambda read: {})
    parts.endpoint.answer_text({**later.commands(), Get: gets.get, Create: admin.create}, puts.puts, puts.puts)
    yield parts
    dedupe.stop()
    dedupe.close()
    timers.close()
    parts.close()


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with serving(tmp_path / "data") as parts:
        yield parts


@pytest.fixture
def client(parts: Parts) -> Text:
    return Text(parts)


def answer(parts: Parts, client: Text, data: bytes) -> tuple[int, list[str]]:
    """The code and the words of the reply to one put."""
    at_once = client.send(data)
    parts.end_turn()
    line, _, body = (at_once + client.answers()).decode().partition("\r\n")
    return int(line.split(" ")[1]), body.split(" ")


def stored(parts: Parts, words: list[str]) -> tuple[bytes, dict[str, str]]:
    """Body and properties of the record that an answer tells of: an id ends with its log offset."""
    found = parts.store.log.record_at(int(words[0]) & (1 << EPOCH_SHIFT) - 1)
    assert found is not None
    record = decode_record(found.buffer[found.at : found.at + found.size])
    return bytes(record.body), decode_properties(record.properties)


def test_options_become_properties(parts: Parts, client: Text) -> None:
    """MY-005, MY-029, E-07, E-22: the answer is that of an ordinary put."""
    code, words = answer(parts, client, PUT + b" priority=7 id=a-1 key=gr\xc3\xbcn 2\r\npaid")
    assert (code, words[1:]) == (200, ["0", "0"])
    body, pairs = stored(parts, words)
    assert body == b"paid"
    assert {name: pairs[name] for name in (PRIORITY, DEDUPE_ID, SHARDING_KEY)} == {
        PRIORITY: "7",
        DEDUPE_ID: "a-1",
        SHARDING_KEY: "grün",
    }
    assert TAGS not in pairs


def test_an_option_and_an_attribute(parts: Parts, client: Text) -> None:
    code, words = answer(parts, client, b"put orders 1 11 1 key=k 2\r\n\0\0\0\3redpaid")
    assert (code, words[1]) == (200, "1")
    body, pairs = stored(parts, words)
    assert body == b"paid"
    assert (pairs[TAGS], pairs[SHARDING_KEY]) == ("red", "k")
    assert DEDUPE_ID not in pairs
    assert PRIORITY not in pairs


@pytest.mark.parametrize("time", [b"", b" delay=60000"])
@pytest.mark.parametrize("topic", ["orders", "levels"])
def test_the_messages_of_a_key_go_to_one_partition(parts: Parts, client: Text, topic: str, time: bytes) -> None:
    """MY-005: if the broker chooses, that of the hash by which the other clients choose, also in a topic with priorities."""
    parts.context.topics.put(Topic("levels", 2, 2, attributes={"message.type": "PRIORITY"}))
    for key in ("a", "b", "a", "b"):
        _, words = answer(parts, client, b"put %b -1 4 0 key=%b%b 2\r\npaid" % (topic.encode(), key.encode(), time))
        assert words[1] == str(abs(java_hash(key)) % 2)


def test_the_messages_of_a_key_go_to_one_partition_of_a_topic_that_they_create(tmp_path: Path) -> None:
    with serving(tmp_path / "data", default_partitions=4, auto_create_topics=True) as parts:
        found = {answer(parts, Text(parts), b"put new -1 4 0 key=b 2\r\npaid")[1][1] for _ in range(3)}
    assert found == {str(abs(java_hash("b")) % 4)}


def test_puts_with_and_without_options_follow_each_other(parts: Parts, client: Text) -> None:
    """Each is answered in its order, at the position where a get finds it."""
    client.send(PUT + b" 1\r\npaid" + PUT + b" priority=0 2\r\nsent" + PUT + b" 3\r\ndone")
    parts.end_turn()  # what follows a reply that is owed waits for it
    parts.end_turn()
    parts.end_turn()
    assert re.findall(rb"\r\n\d+ 0 (\d+)(?=result 200 |$)", client.answers()) == [b"0", b"24", b"48"]
    got = client.send(b"get orders billing 0 24 1000 4\r\n")
    assert got.startswith(b"value 48 4\r\n")
    assert b"sent" in got
    assert got.endswith(b"done")


def test_a_put_with_a_time_is_parked_with_its_properties(parts: Parts, client: Text) -> None:
    """ES-001: the answer ends with a handle."""
    code, words = answer(parts, client, PUT + b" delay=60000 priority=7 key=k 2\r\npaid")
    assert code == 200
    assert words[1:3] == ["0", "-1"]
    assert len(words) == 4
    _, pairs = stored(parts, words)
    assert (pairs[PRIORITY], pairs[SHARDING_KEY]) == ("7", "k")
    assert int(pairs[TIMER_OUT]) == parts.clock.now_ms() + 60_000


def test_a_put_whose_time_is_over_has_its_position_at_once(parts: Parts, client: Text) -> None:
    code, words = answer(parts, client, PUT + b" at=1 2\r\npaid")
    assert (code, words[1:]) == (200, ["0", "0"])


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (b"put orders 7 4 0 key=k 2\r\npaid", 500, "wrong partition 7"),
        (b"put nothing 0 4 0 key=k 2\r\npaid", 500, "The server do not accept topic nothing"),
        (b"put orders 0 4 0 5 key=k 2\r\npaid", 500, "Checksum failure"),
        (b"put orders 0 4 1 key=k 2\r\npaid", 400, "flag bit 0 announces an attribute"),
        (b"put orders 0 4 0 TX:a:1 key=k 2\r\npaid", 400, "in a transaction cannot have options: not priority=, key=, id="),
        (b"put orders 0 4 0 TX:a:1 priority=1 2\r\npaid", 400, "in a transaction cannot have options: not priority="),
    ],
)
def test_a_put_with_options_that_is_refused(parts: Parts, client: Text, data: bytes, code: int, text: str) -> None:
    found, words = answer(parts, client, data)
    assert found == code
    assert text in " ".join(words)
    assert parts.store.log.end == 0
    assert parts.context.counters.put_failed.count == 1


COMMANDS_WITHOUT_HANDLER: Final = [
    b"subscribe orders billing",
    b"unsubscribe orders billing",
    b"ready 5",
    b"pop orders billing 1",
    b"ack 0-1-a",
    b"nack 0-1-a",
    b"extend 0-1-a 1000",
    b"offset orders billing 0 0",
]


@pytest.mark.parametrize("line", COMMANDS_WITHOUT_HANDLER)
def test_a_command_without_handler_is_refused_and_the_session_goes_on(client: Text, line: bytes) -> None:
    answers = client.send(line + b" 3\r\nget orders billing 0 0 100 4\r\n")
    assert answers.startswith(b"result 400 29 3\r\nthis command is not availableresult 404 ")


def test_create_makes_a_topic_with_priorities(parts: Parts, client: Text) -> None:
    """MY-029: also of one that exists, whose other attributes stay; without the option, and with no, it stays what it is."""

    def create(topic: str, option: str = "") -> dict[str, str]:
        early = client.send(f"create {topic} 4{option} 3\r\n".encode())
        gevent.sleep(0)  # for the greenlet that answers
        assert early + client.answers() == b"result 200 1 3\r\n4"
        found = parts.context.topics.get(topic)
        assert found is not None and found.partitions == 4
        return dict(found.attributes)

    assert create("levels", " priority=yes") == {"message.type": "PRIORITY"}
    assert create("levels") == create("levels", " priority=no") == {"message.type": "PRIORITY"}
    assert create("plain", " priority=no") == {}
    parts.context.topics.put(Topic("once", 2, 2, attributes={"dedupe.window.ms": "1000"}))
    assert create("once", " priority=yes") == {"dedupe.window.ms": "1000", "message.type": "PRIORITY"}
    assert client.send(b"put levels 0 1 0 priority=9 4\r\nx") == b""
    parts.end_turn()
    assert client.answers().split()[-2] == b"3"


@pytest.mark.parametrize("command", ["create METAQ_SYS_TIMERS 9 1", "create TBW102 100 1", "create TBW102 1 priority=yes 1"])
def test_create_leaves_the_topics_of_the_broker_alone(parts: Parts, client: Text, command: str) -> None:
    """MY-029: as all other ways to change topics do."""
    before = list(parts.context.topics)
    answer = client.send(f"{command}\r\n".encode())
    assert answer.startswith(b"result 403 ")
    assert answer.endswith(b" belongs to the broker: it cannot be created or changed")
    assert list(parts.context.topics) == before


def places(parts: Parts, client: Text, *puts: bytes) -> list[bytes]:
    """What puts of one turn, each in a session of its own, are answered: the place of the message, without the opaque."""
    clients = [client, *(Text(parts) for _ in puts[1:])]
    at_once = [each.send(put) for each, put in zip(clients, puts, strict=True)]
    parts.end_turn()
    answers = [first + each.answers() for first, each in zip(at_once, clients, strict=True)]
    assert [answer[:11] for answer in answers] == [b"result 200 "] * len(puts)
    return [answer.partition(b"\r\n")[2] for answer in answers]


@pytest.mark.parametrize("time", [b"", b" delay=60000", b" at=1"])
def test_an_id_is_stored_once_in_a_topic_with_a_window(parts: Parts, client: Text, time: bytes) -> None:
    """E-07, E-22: in one turn and in later ones; the answer is that of the first, whatever the partition and the body."""
    first, second = places(
        parts, client, b"put payments 1 4 0 id=a%b 1\r\npaid" % time, b"put payments 0 4 0 id=a%b 1\r\nsent" % time
    )
    end = parts.store.log.end
    assert first == second
    assert (len(first.split(b" ")) == 4) == (time == b" delay=60000")  # the handle
    parts.clock.advance(WINDOW_MS / 1000)
    assert places(parts, client, b"put payments 0 4 0 id=a%b 1\r\npaid" % time) == [first]
    assert parts.store.log.end == end
    (other,) = places(parts, client, b"put payments 1 4 0 id=b%b 1\r\npaid" % time)
    assert other != first
    assert parts.store.log.end > end


def test_an_id_that_was_parked_is_answered_with_its_handle_when_it_comes_without_a_time(parts: Parts, client: Text) -> None:
    (parked,) = places(parts, client, b"put payments 1 4 0 id=a delay=60000 1\r\npaid")
    assert places(parts, client, b"put payments 0 4 0 id=a 1\r\npaid") == [parked]


@pytest.mark.parametrize("time", [b"", b" delay=60000"])
def test_an_id_is_answered_as_before_by_the_next_master(tmp_path: Path, time: bytes) -> None:
    """E-07: with the epoch in which its message was put."""
    put = b"put payments 1 4 0 id=%%b%b 1\r\npaid" % time
    with serving(tmp_path / "data") as parts:
        (first,) = places(parts, Text(parts), put % b"a")
        parts.context.epochs.begin(2, 7)
        parts.store.append()
    with serving(tmp_path / "data") as parts:
        assert places(parts, Text(parts), put % b"a") == [first]
        (other,) = places(parts, Text(parts), put % b"b")
    assert [int(place.split(b" ")[0]) >> EPOCH_SHIFT for place in (first, other)] == [1, 2]


def cancel(parts: Parts, parked: bytes) -> Text:
    """Have a parked message cancelled in this turn; return the client that is answered at its end."""
    client = Text(parts)
    client.send(b"cancel %b 2\r\n" % parked.split(b" ")[3])
    gevent.sleep(0)  # for the greenlet that stages it
    return client


def test_an_id_is_released_by_the_cancel_of_its_message(parts: Parts, client: Text) -> None:
    """E-07: also for a put of the same turn; not by a cancel that is not stored."""
    put = b"put payments 1 4 0 id=a delay=60000 1\r\npaid"
    (first,) = places(parts, client, put)
    cancelling = cancel(parts, first)
    (second,) = places(parts, client, put)
    gevent.sleep(0)  # for the greenlet that answers
    assert cancelling.answers() == b"result 200 9 2\r\ncancelled"
    assert second != first
    assert places(parts, client, put) == [second]
    cancelling = cancel(parts, second)
    parts.store.fence.guard(refuse)
    parts.end_turn()
    parts.store.fence.guard(lambda: None)
    gevent.sleep(0)
    assert cancelling.answers().startswith(b"result 503 ")
    assert places(parts, client, put) == [second]


def test_a_cancel_releases_no_id_of_a_later_message(parts: Parts, client: Text) -> None:
    """E-07: the id of a message that is delayed for longer than the window may come again while it waits."""
    put = b"put payments 1 4 0 id=a delay=%d 1\r\npaid"
    (first,) = places(parts, client, put % 600_000)
    parts.clock.advance(3 * WINDOW_MS / 1000)
    (second,) = places(parts, client, put % 600_000)
    cancel(parts, first)
    parts.end_turn()
    assert second != first
    assert places(parts, client, put % 600_000) == [second]


def test_a_cancel_releases_no_id_that_another_message_has_by_now(parts: Parts, client: Text) -> None:
    """E-07: it came because the window was changed, and no id of before is known."""
    put = b"put payments 1 4 0 id=a delay=600000 1\r\npaid"
    (first,) = places(parts, client, put)
    parts.context.topics.put(Topic("payments", 2, 2, attributes={"dedupe.window.ms": str(10 * WINDOW_MS)}))
    (second,) = places(parts, client, put)
    cancel(parts, first)
    parts.end_turn()
    assert second != first
    assert places(parts, client, put) == [second]


@pytest.mark.parametrize("jump_ms", [-WINDOW_MS, WINDOW_MS])
def test_an_id_is_released_although_the_clock_was_set(parts: Parts, client: Text, jump_ms: int) -> None:
    """E-07, D-2: by a window or less, and then the id is that of the later message."""
    put = b"put payments 1 4 0 id=a delay=600000 1\r\npaid"
    (first,) = places(parts, client, put)
    parts.clock.jump(jump_ms)
    cancel(parts, first)
    (second,) = places(parts, client, put)
    assert second != first
    assert places(parts, client, put) == [second]
    parts.clock.jump(-jump_ms)
    assert places(parts, client, put) == [second]


def refuse() -> None:
    raise Fenced("another replica is the master")


@pytest.mark.parametrize("put", [PUT + b" id=a", PUT + b" id=a delay=60000", b"put payments 0 4 0 key=a"])
def test_without_a_window_or_an_id_every_put_is_stored(parts: Parts, client: Text, put: bytes) -> None:
    found = places(parts, client, put + b" 1\r\npaid", put + b" 1\r\npaid")
    found += places(parts, client, put + b" 1\r\npaid")
    assert len(set(found)) == 3
