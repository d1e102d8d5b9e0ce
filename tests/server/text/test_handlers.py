"""``put``, ``get`` and ``stats``: the handlers alone, in the process of the test (``tests.support.inprocess``)."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.errors import DiskFailed
from metaq.protocol.text.commands import Get, Offset, Stats
from metaq.protocol.text.messages import EPOCH_SHIFT, decode_text_messages
from metaq.server.text.admin import AdminHandler
from metaq.server.text.get import GetHandler
from metaq.server.text.put import PutHandler
from metaq.store.files.filecache import Read
from tests.support.faultydisk import DATA, FaultyDisk, FaultyFile
from tests.support.inprocess import Parts, Text

PUT: Final = b"put orders 0 4 0 1\r\npaid"
PLACE: Final = b"0 0"
"""The partition and the position of the first message, at the end of the answer to its put."""


class NoOpening(FaultyDisk):
    """A disk that opens no files any more, once it is told so."""

    opens = True

    def open(self, path: Path) -> FaultyFile:
        if not self.opens:
            raise DiskFailed(f"cannot open {path}: input/output error")
        return super().open(path)


def serve(parts: Parts) -> None:
    """Answer ``put``, ``get``, ``offset`` and ``stats``."""
    gets = GetHandler(parts.context, parts.holds, parts.reads, parts.loop)

    def transactions(read: Read) -> dict[str, object]:
        read(parts.store.files.open(parts.settings.data / "transactions"), 0, 0)
        return {"undecided": 7}

    admin = AdminHandler(parts.context, parts.endpoint, lambda: None, transactions)
    puts = PutHandler(parts.context, parts.turns).puts
    parts.endpoint.answer_text({Get: gets.get, Offset: gets.offset, Stats: admin.stats}, puts, puts)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path / "data", topics={"orders": {"partitions": 2}})
    serve(parts)
    yield parts
    parts.close()


@pytest.fixture
def client(parts: Parts) -> Text:
    return Text(parts)


def test_a_put_is_answered_when_its_turn_ends(parts: Parts, client: Text) -> None:
    """MY-020: by the place of the message, once it is in the log."""
    assert client.send(PUT) == b""
    assert parts.store.log.end == 0
    parts.end_turn()
    answer = client.answers()
    assert answer.startswith(b"result 200 ")
    assert answer.endswith(b" " + PLACE)
    assert parts.store.log.end > 0


def test_puts_of_one_turn_are_one_append(parts: Parts, client: Text) -> None:
    other = Text(parts)
    client.send(2 * PUT)
    other.send(PUT)
    parts.end_turn()
    assert parts.turns.number == 1
    assert client.answers().count(b"result 200 ") == 2
    assert other.answers().count(b"result 200 ") == 1


def test_a_put_that_a_slave_gets(parts: Parts, client: Text) -> None:
    parts.store.fence.close("this replica is a slave")
    client.send(PUT)
    parts.end_turn()
    answer = client.answers()
    assert answer.startswith(b"result 503 ")
    assert answer.endswith(b"this replica is a slave")
    assert parts.context.counters.put_failed.count == 1
    assert parts.store.log.end == 0


def test_a_get_returns_what_was_put(parts: Parts, client: Text) -> None:
    client.send(PUT)
    assert client.send(b"get orders billing 0 0 1000 2\r\n") == b""  # it waits for the put before it
    parts.end_turn()
    put, _, got = client.answers().partition(b"value ")
    assert put.startswith(b"result 200 ")
    assert got.endswith(b"paid")
    assert client.send(b"get orders billing 1 0 1000 3\r\n").startswith(b"result 404 ")


@pytest.mark.parametrize("hot_bytes", [0, 1 << 20])
def test_an_id_names_the_epoch_in_which_its_message_was_put(parts: Parts, client: Text, hot_bytes: int) -> None:
    """MQ-056: in an answer of messages of several epochs, whether the log in memory or the file is read."""
    parts.store.log._hot_bytes = hot_bytes
    epochs = parts.context.epochs
    for number in (4, 5, 9):
        client.send(2 * PUT)
        parts.end_turn()
        epochs.begin(number, 7)
        parts.store.append()
    client.send(PUT)
    parts.end_turn()
    client.answers()
    head, _, body = client.send(b"get orders billing 0 0 10000 2\r\n").partition(b"\r\n")
    assert head.startswith(b"value ")
    found = [message.id >> EPOCH_SHIFT for message in decode_text_messages(body, 0)]
    assert found == [1, 1, 4, 4, 5, 5, 9]


def test_a_held_get_is_answered_by_the_put_that_it_waits_for(parts: Parts, client: Text) -> None:
    waiting = Text(parts)
    assert waiting.send(b"get orders billing 0 0 1000 2 wait=1000\r\n") == b""
    assert parts.holds.of_clients == 1
    client.send(PUT)
    parts.end_turn()
    assert waiting.answers().endswith(b"paid")
    assert parts.holds.of_clients == 0


def test_no_get_is_held_once_the_broker_stops(parts: Parts, client: Text) -> None:
    waiting = Text(parts)
    waiting.send(b"get orders billing 0 0 1000 1 wait=1000\r\n")
    parts.holds.stop()
    assert client.send(b"get orders billing 0 0 1000 2 wait=1000\r\n").startswith(b"result 404 ")
    assert waiting.answers() == b""
    parts.holds.wake_all()
    assert waiting.answers().startswith(b"result 404 ")


def test_what_a_broker_finds_in_its_store_is_not_counted_as_put_lately(parts: Parts, client: Text) -> None:
    """MQ-064: the counters of a topic begin with the process, or with its role."""
    client.send(3 * PUT)
    parts.end_turn()
    client.answers()
    admin = AdminHandler(parts.context, parts.endpoint, lambda: None, lambda read: {})
    parts.endpoint.answer_text({Stats: admin.stats}, *2 * (PutHandler(parts.context, parts.turns).puts,))
    assert b"topic_realtime_put null" in client.send(b"stats orders 1\r\n")
    client.send(PUT)
    parts.end_turn()
    client.answers()
    shown = client.send(b"stats orders 1\r\n")
    assert b"message_count 4" in shown
    assert b"topic_realtime_put Count=1," in shown
    assert b"topic_realtime_message_size Count=1," in shown


def test_statistics_count_messages(parts: Parts, client: Text) -> None:
    client.send(3 * PUT)
    parts.end_turn()
    client.answers()
    lines = client.send(b"stats 1\r\n").decode().splitlines()
    assert "undecided 7" in lines
    assert "writable yes" in lines


@pytest.mark.parametrize("item", ["", "topics ", "offsets ", "orders "])
def test_statistics_leave_out_what_the_disk_cannot_give(item: str) -> None:
    """MQ-064: the connection stays open."""
    disk = NoOpening(random.Random(0))
    parts = Parts(DATA, disk, topics={"orders": {"partitions": 2}})
    serve(parts)
    client = Text(parts)
    client.send(PUT)
    parts.end_turn()
    client.answers()
    disk.opens = False
    parts.store.files.clear()
    for opaque in ("1", "2"):
        head, _, body = client.send(f"stats {item}{opaque}\r\n".encode()).decode().partition("\r\n")
        assert head.startswith("result 200 ")
        assert head.endswith(f" {opaque}")
        assert body.endswith("END\r\n")
    disk.opens = True
    parts.close()
