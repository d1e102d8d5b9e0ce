"""Starting, stopping and limits of a real broker process, and disks that are slow or fail."""

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.client.text.textclient import parse_stats
from metaq.errors import Refused
from metaq.protocol.text.commands import NO_OPAQUE
from metaq.protocol.text.replies import BAD_REQUEST, ERROR, NOT_FOUND, OK, UNAVAILABLE, VALUE, Reply
from metaq.protocol.text.writing import write_get, write_put
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import read_document, write_document
from metaq.store.recovery.recovery import FORMAT_VERSION, IDENTITY
from tests.support.broker import BrokerFailed, BrokerProcess, wait_until
from tests.support.slowdisk import SMALL, Controlled
from tests.support.talk import ReplyReader

DEADLINE_S: Final = 60.0
LEVELS: Final = ("memory", "disk")


class Talk:
    """One connection, spoken to in bytes."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.socket = broker.connect()
        self._reader = ReplyReader()
        self._replies: list[Reply] = []

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def replies(self, count: int) -> list[Reply]:
        """The next so many replies; waits for them."""
        while len(self._replies) < count:
            data = self.socket.recv(1 << 16)
            assert data, f"the broker closed the connection after {self._replies}"
            self._replies += self._reader.receive(data)
        taken, self._replies = self._replies[:count], self._replies[count:]
        return taken

    def rest(self) -> list[Reply]:
        """All replies until the broker closes the connection."""
        while data := self.socket.recv(1 << 16):
            self._replies += self._reader.receive(data)
        return self._replies

    def ask(self, data: bytes) -> Reply:
        self.send(data)
        return self.replies(1)[0]


@pytest.fixture
def talk() -> Iterator[Callable[[BrokerProcess], Talk]]:
    """Makes connections that are closed in the end."""
    with contextlib.ExitStack() as stack:

        def connect(broker: BrokerProcess) -> Talk:
            talk = Talk(broker)
            stack.enter_context(talk.socket)
            return talk

        yield connect


Connect = Callable[[BrokerProcess], Talk]


def client_of(broker: BrokerProcess) -> TextClient:
    return TextClient(broker.host, broker.port, timeout_s=DEADLINE_S)


def bodies(broker: BrokerProcess, topic: str) -> list[bytes]:
    with client_of(broker) as client:
        return [message.body for message in client.iterate(topic)]


def refused_start(broker: BrokerProcess) -> str:
    """Return the last line that a broker writes to standard error when it refuses to start."""
    with pytest.raises(BrokerFailed, match="ended with 1 "):
        broker.start()
    *_, last = broker.stderr().splitlines()
    assert last.startswith("metaq: ")
    return last


# -- starting ---------------------------------------------------------------------------------------------------------


def test_the_ready_line(tmp_path: Path) -> None:
    """E-10: one line of key=value pairs, with the real port; nothing else on standard output."""
    data = tmp_path / "data"
    with BrokerProcess(data, *SMALL) as broker:
        output = data.with_name("data.stdout").read_text()
        where = f"listen=127.0.0.1:{broker.port} registry={broker.registry}"
        assert output == f"metaq ready {where} data={data} pid={broker.pid} http={broker.http} console=http://{broker.http}/\n"
        assert broker.port


def test_a_folder_has_one_broker(tmp_path: Path) -> None:
    """RD-004: a second one says who is in the way, and harms nothing."""
    with BrokerProcess(tmp_path / "data", *SMALL) as first, client_of(first) as client:
        client.put("t", b"before")
        second = BrokerProcess(first.data, *SMALL)
        second.log = tmp_path / "second.stderr"
        assert f"{first.data} is in use by another process" in refused_start(second)
        client.put("t", b"after")
        assert bodies(first, "t") == [b"before", b"after"]


def test_a_port_has_one_broker(tmp_path: Path) -> None:
    """SG-006: and the folder of the one that is refused stays free."""
    with BrokerProcess(tmp_path / "first", *SMALL) as first:
        second = BrokerProcess(tmp_path / "second", *SMALL, listen=f"127.0.0.1:{first.port}")
        assert f"cannot take 127.0.0.1:{first.port}" in refused_start(second)
    with BrokerProcess(second.data, *SMALL):
        pass


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    """RD-001: nothing in it is touched."""
    with BrokerProcess(tmp_path / "data", *SMALL) as broker:
        pass
    content, _ = read_document(RealDisk(), broker.data / IDENTITY)
    assert content is not None
    write_document(RealDisk(), broker.data / IDENTITY, {**content, "format": FORMAT_VERSION + 1})
    before = {path: path.read_bytes() for path in broker.data.rglob("*") if path.is_file()}
    assert f"has format version {FORMAT_VERSION + 1}, this metaq reads {FORMAT_VERSION}" in refused_start(broker)
    assert {path: path.read_bytes() for path in broker.data.rglob("*") if path.is_file()} == before


def test_a_public_address_must_be_meant(tmp_path: Path) -> None:
    """SG-008: nobody opens a broker without users to the network by accident."""
    broker = BrokerProcess(tmp_path / "data", *SMALL, listen="0.0.0.0:0")
    assert "other machines can reach 0.0.0.0" in refused_start(broker)
    broker.flags = (*SMALL, "--allow-public")
    assert "0.0.0.0 is not an address to connect to; set advertise" in refused_start(broker)
    broker.flags = (*SMALL, "--allow-public", "--advertise", "127.0.0.1:8123")
    with broker, socket.create_connection(("127.0.0.1", broker.port), timeout=DEADLINE_S) as connection:
        connection.sendall(b"version 1\r\n")
        assert connection.recv(100).startswith(b"result 200 ")


def test_sizes_may_change_between_starts(tmp_path: Path) -> None:
    """MQ-013, MQ-016, SG-014: segments and queue files of mixed sizes, read whole."""
    broker = BrokerProcess(tmp_path / "data")
    sent: list[bytes] = []
    for segment, queue_file in [(1 << 20, 1 << 20), (65_536, 256), (262_144, 4096), (40_000, 16 * 17)]:
        broker.flags = ("--max-body-bytes", "4096", "--segment-bytes", str(segment), "--queue-file-bytes", str(queue_file))
        with broker, client_of(broker) as client:
            assert bodies(broker, "t") == sent
            new = [b"%d" % number + bytes(200) for number in range(len(sent), len(sent) + 500)]
            client.put_many("t", new)
            sent += new
            assert bodies(broker, "t") == sent


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_restart_keeps_everything(tmp_path: Path, level: str) -> None:
    """MQ-004, RD-005: after an orderly stop and after a kill, and what comes then goes behind it."""
    sent: list[bytes] = []
    end = 0
    with BrokerProcess(tmp_path / "data", *SMALL, durability=level) as broker:
        for orderly in (True, False, True):
            new = [b"%d-%d" % (len(sent), number) for number in range(300)]
            with client_of(broker) as client:
                results = client.put_many("t", new, attribute="tag")
                assert results[0].position >= end
                end = results[-1].position
            sent += new
            if orderly:
                assert broker.terminate() == 0
                assert not (broker.data / "abort").exists()
            broker.restart()
            assert bodies(broker, "t") == sent


def test_partitions_that_were_created_stay(tmp_path: Path) -> None:
    """MQ-006, MQ-017: also when the broker is killed right after it has said so."""
    with BrokerProcess(tmp_path / "data", *SMALL) as broker:
        with client_of(broker) as client:
            assert client.create("many", 7) == 7
        broker.restart()
        with client_of(broker) as client:
            assert client.create("many", 1) == 7
            assert client.put("many", b"x", partition=6).position == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_stop_answers_what_it_takes(tmp_path: Path, level: str) -> None:
    """MQ-038: under load, what is stored is what was acknowledged."""
    with BrokerProcess(tmp_path / "data", *SMALL, durability=level) as broker:
        stored: list[set[int]] = [set() for _ in range(3)]
        threads = [threading.Thread(target=put_until_closed, args=(broker, f"t{n}", stored[n])) for n in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(len(numbers) > 50 for numbers in stored), DEADLINE_S, "the load is on")
        assert broker.terminate() == 0
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        broker.start()
        for number, numbers in enumerate(stored):
            assert {int(body) for body in bodies(broker, f"t{number}")} == numbers


def test_a_stop_answers_what_was_sent_before(tmp_path: Path) -> None:
    """MQ-038, SG-140: also what lies unread at that moment, and the first word of those that had only connected."""
    with BrokerProcess(tmp_path / "data") as broker, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(broker.connect()) for _ in range(300)]
        with client_of(broker) as client:
            client.create("t", 1)
            wait_until(
                lambda: int(parse_stats(client.stats())["curr_connections"]) > 300, DEADLINE_S, "the broker has taken them all"
            )
        for number, connection in enumerate(connections[::2]):
            connection.sendall(write_put("t", 0, 0, b"first", number))
            assert connection.recv(1 << 16).startswith(b"result 200")
        os.kill(broker.pid, signal.SIGSTOP)
        for number, connection in enumerate(connections):
            connection.sendall(write_put("t", 0, 0, b"last", number))
        os.kill(broker.pid, signal.SIGTERM)
        os.kill(broker.pid, signal.SIGCONT)
        for connection in connections:
            assert connection.recv(1 << 16).startswith(b"result 200")
        assert broker.terminate() == 0


def put_until_closed(broker: BrokerProcess, topic: str, stored: set[int]) -> None:
    """Keep puts in flight until the broker closes the connection; collect the numbers of those it acknowledged."""
    numbers = itertools.count()
    reader = ReplyReader()
    with broker.connect() as connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        batch = [next(numbers) for _ in range(100)]
        connection.sendall(b"".join(write_put(topic, 0, 0, b"%d" % number, number) for number in batch))
        while data := connection.recv(1 << 16):
            replies = reader.receive(data)
            assert all(reply.code == OK for reply in replies)
            stored |= {reply.opaque for reply in replies}
            batch = [next(numbers) for _ in replies]
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # replies may have come before that
                connection.sendall(b"".join(write_put(topic, 0, 0, b"%d" % number, number) for number in batch))


# -- limits -----------------------------------------------------------------------------------------------------------


def test_one_connection_too_many(tmp_path: Path, talk: Connect) -> None:
    """E-15: it is told why and closed; the others go on, and there is room again when one leaves."""
    with BrokerProcess(tmp_path / "data", *SMALL, "--max-connections", "2", "--log-level", "DEBUG") as broker:
        looked = "advertised address is right"  # the broker connects to itself for that
        wait_until(lambda: looked in broker.stderr(), DEADLINE_S, "the broker has looked")
        first = talk(broker)
        wait_until(lambda: stats(first)["curr_connections"] == "1", DEADLINE_S, "the broker's own connection is closed")
        second = talk(broker)
        assert [one.ask(b"version 1\r\n").code for one in (first, second)] == [OK, OK]
        (refusal,) = talk(broker).rest()
        assert (refusal.code, refusal.opaque) == (UNAVAILABLE, int(NO_OPAQUE))
        assert b"2 connections already (max_connections); retry after 1000 ms" in refusal.body
        assert second.ask(b"version 2\r\n").code == OK
        first.socket.close()

        def served() -> bool:
            with contextlib.closing(broker.connect()) as connection:
                connection.sendall(b"version 1\r\n")
                return connection.recv(100).startswith(b"result 200 ")

        wait_until(served, DEADLINE_S, "a connection is taken again")


def test_a_get_that_waits_is_not_idle(tmp_path: Path, talk: Connect) -> None:
    """MQ-054, RD-006: silence closes a connection only when no answer is due."""
    with BrokerProcess(tmp_path / "data", *SMALL, "--idle-timeout-ms", "3000") as broker:  # also for the first word
        waiting = talk(broker)
        waiting.send(write_get("t", "g", 0, 0, 1000, 1, wait_ms=30_000))
        silent = talk(broker)
        assert silent.ask(b"version 1\r\n").code == OK
        assert silent.rest() == []
        with client_of(broker) as client:
            client.put("t", b"hello")
        assert waiting.replies(1)[0].body[20:] == b"hello"


def test_a_get_waits_no_longer_than_it_asked(tmp_path: Path, talk: Connect) -> None:
    """RD-006: nor than the broker allows."""
    with BrokerProcess(tmp_path / "data", *SMALL, "--max-hold-ms", "100") as broker:
        for wait_ms in (50, 1_000_000_000):
            asked = time.monotonic()
            assert talk(broker).ask(write_get("t", "g", 0, 0, 1000, 1, wait_ms=wait_ms)).code == NOT_FOUND
            assert time.monotonic() - asked >= min(wait_ms, 100) / 1000


def test_a_body_beyond_the_limit(tmp_path: Path, talk: Connect) -> None:
    """E-15, MQ-059: refused by name, drained, and the next command is understood; at the limit it is taken."""
    with BrokerProcess(tmp_path / "data", *SMALL) as broker:
        one = talk(broker)
        for size in (65_537, 5_000_000):
            one.send(write_put("t", 0, 0, bytes(size), 1) + write_put("t", 0, 0, b"fits", 2))
            refusal, stored = one.replies(2)
            assert (refusal.code, refusal.opaque) == (BAD_REQUEST, 1)
            assert b"%d bytes is larger than 65536 (max_body_bytes)" % size in refusal.body
            assert (stored.code, stored.opaque) == (OK, 2)
        assert one.ask(write_put("t", 0, 0, bytes(65_536), 3)).code == OK
        assert bodies(broker, "t") == [b"fits", b"fits", bytes(65_536)]


def test_a_slow_reader_gets_everything_in_the_end(tmp_path: Path, talk: Connect) -> None:
    """MQ-058, MQ-060: others are served meanwhile; its answers come in order, whole."""
    flags = (*SMALL, "--max-unsent-bytes", "65536")
    with BrokerProcess(tmp_path / "data", *flags) as broker, client_of(broker) as client:
        sent = [bytes([number]) * 60_000 for number in range(100)]
        ends = [result.position + 60_020 for result in client.put_many("t", sent)]
        slow = talk(broker)
        gets = [write_get("t", "g", 0, end - 60_020, 1, number) for number, end in enumerate(ends)]
        slow.send(b"".join(gets) * 4)  # 24 MB, more than all buffers between two processes hold
        for _ in range(50):
            client.put("other", b"x")
        assert len(bodies(broker, "other")) == 50
        replies = slow.replies(4 * len(gets))
        assert [reply.opaque for reply in replies] == 4 * list(range(len(gets)))
        assert [reply.body[20:] for reply in replies] == 4 * sent


@pytest.mark.parametrize("level", LEVELS)
def test_commands_of_one_segment_are_answered_in_order(tmp_path: Path, talk: Connect, level: str) -> None:
    """MQ-056, MQ-058: a get behind a put finds its message, whatever the put has to wait for."""
    with BrokerProcess(tmp_path / "data", *SMALL, durability=level) as broker:
        one = talk(broker)
        for turn in range(20):
            put, get = write_put("t", 0, 0, b"%03d" % turn, 3 * turn), write_get("t", "g", 0, 23 * turn, 1, 3 * turn + 1)
            one.send(put + get + b"version %d\r\n" % (3 * turn + 2))
            replies = one.replies(3)
            assert [reply.opaque for reply in replies] == [3 * turn, 3 * turn + 1, 3 * turn + 2]
            assert [reply.code for reply in replies] == [OK, VALUE, OK]
            assert replies[1].body[20:] == b"%03d" % turn


# -- slow and failing disks -------------------------------------------------------------------------------------------


def put(number: int) -> bytes:
    return write_put("t", 0, 0, b"%d" % number, number)


def test_a_put_waits_for_the_disk(tmp_path: Path, talk: Connect) -> None:
    """SG-041, RD-011: neither answered nor delivered before its sync; other commands do not wait."""
    with Controlled(tmp_path / "data") as broker:
        waiting, putting, other = talk(broker), talk(broker), talk(broker)
        assert putting.ask(put(0)).code == OK
        broker.stall()
        waiting.send(write_get("t", "g", 0, 21, 1000, 7, wait_ms=30_000))
        putting.send(put(1))
        log_end = int(stats(other)["log_end"])
        wait_until(lambda: int(stats(other)["log_end"]) > int(stats(other)["log_durable_end"]), DEADLINE_S, "appended")
        assert int(stats(other)["log_end"]) >= log_end
        assert other.ask(write_get("t", "g", 0, 21, 1000, 1)).code == NOT_FOUND
        broker.go_on()
        assert putting.replies(1)[0].code == OK
        assert waiting.replies(1)[0].body[20:] == b"1"


def stats(talk: Talk) -> dict[str, str]:
    return parse_stats(talk.ask(b"stats 1\r\n").body.decode())


STORED: Final = (OK, ERROR)
"""What a put is answered where the disk may take longer than it waits."""


def test_a_put_whose_sync_takes_too_long(tmp_path: Path, talk: Connect) -> None:
    """MQ-040, MQ-062: it is told where it is stored and what that is not yet; it is read once it is safe."""
    with Controlled(tmp_path / "data", "--sync-timeout-ms", "3000") as broker:
        one, other = talk(broker), talk(broker)
        assert one.ask(put(0)).code in STORED
        broker.stall()
        one.send(put(1) + put(2))
        first, second = one.replies(2)
        assert (first.code, first.opaque, second.code, second.opaque) == (ERROR, 1, ERROR, 2)
        words = second.body.decode().split(" ")
        assert words[:2] + words[3:] == ["stored", "at", "0", "42,", "not", "yet", "disk"]
        assert other.ask(write_get("t", "g", 0, 21, 1, 1)).code == NOT_FOUND
        broker.go_on()
        found = other.ask(write_get("t", "g", 0, 42, 1, 1, wait_ms=30_000))
        assert int.from_bytes(found.body[8:16]) == int(words[2])
        assert one.ask(put(3)).code in STORED
        wait_until(lambda: bodies(broker, "t") == [b"0", b"1", b"2", b"3"], DEADLINE_S, "all are safe")


def test_a_failed_sync_fails_all_that_waits(tmp_path: Path, talk: Connect) -> None:
    """MQ-040, SG-041: nothing is acknowledged from then on, gets go on, and a restart makes it good."""
    with Controlled(tmp_path / "data") as broker:
        many, one, other = talk(broker), talk(broker), talk(broker)
        assert one.ask(put(0)).code == OK
        broker.stall()
        many.send(put(1) + put(2))
        one.send(put(3))
        wait_until(lambda: stats(other)["cmd_put"] == "4", DEADLINE_S, "all are there")
        broker.go_on(failing=True)
        failed = [*many.replies(2), *one.replies(1)]
        assert [(reply.code, reply.opaque) for reply in failed] == [(UNAVAILABLE, number) for number in (1, 2, 3)]
        assert all(b"a test says so" in reply.body and b"not stored" not in reply.body for reply in failed)
        broker.recover()
        refused = one.ask(put(4))
        assert refused.code == UNAVAILABLE
        assert b"read-only until it is restarted" in refused.body
        assert stats(other)["writable"].startswith("no: ")
        assert other.ask(write_get("t", "g", 0, 0, 1000, 1)).body[20:] == b"0"
        assert broker.terminate() == 0
        broker.start()
        with client_of(broker) as client:
            client.put("t", b"5")
        found = bodies(broker, "t")
        assert (found[0], found[-1]) == (b"0", b"5")
        assert set(found[1:-1]) <= {b"1", b"2", b"3"}, "what was not acknowledged may be there, what was refused may not"


def test_a_checkpoint_that_fails_stops_puts_too(tmp_path: Path, talk: Connect) -> None:
    """MQ-040: those that wait are answered, and commands of others as well."""
    with Controlled(tmp_path / "data", "--checkpoint-interval-ms", "50") as broker:
        one, other = talk(broker), talk(broker)
        assert one.ask(put(0)).code == OK
        broker.stall()
        broker.go_on(failing=True)
        answers = (one.ask(put(number)) for number in itertools.count(1))
        refused = next(reply for reply in answers if reply.code != OK)
        assert refused.code == UNAVAILABLE
        assert other.ask(b"version 1\r\n").code == OK
        assert broker.terminate() == 0


def test_a_stop_sends_what_is_due(tmp_path: Path, talk: Connect) -> None:
    """MQ-038: a put that waits for the disk, and a get that waits for a message; no more is taken."""
    with Controlled(tmp_path / "data") as broker:
        putting, waiting = talk(broker), talk(broker)
        assert waiting.ask(put(0)).code == OK
        broker.stall()
        putting.send(put(1))
        wait_until(lambda: stats(waiting)["cmd_put"] == "2", DEADLINE_S, "the put is there")
        waiting.send(b"version 2\r\n" + write_get("t", "g", 0, 42, 1000, 3, wait_ms=30_000))
        assert waiting.replies(1)[0].code == OK
        os.kill(broker.pid, signal.SIGTERM)
        assert [(reply.code, reply.opaque) for reply in waiting.rest()] == [(NOT_FOUND, 3)]
        with pytest.raises(ConnectionRefusedError):
            broker.connect()
        broker.go_on()
        assert [(reply.code, reply.opaque) for reply in putting.rest()] == [(OK, 1)]
        assert broker.terminate() == 0
        broker.start()
        assert bodies(broker, "t") == [b"0", b"1"]


def test_a_stop_does_not_wait_for_ever_for_the_disk(tmp_path: Path, talk: Connect) -> None:
    """SG-041: the put is not answered, and the next start recovers as after a kill."""
    with Controlled(tmp_path / "data", "--drain-timeout-ms", "100") as broker:
        one, other = talk(broker), talk(broker)
        assert one.ask(put(0)).code == OK
        broker.stall()
        one.send(put(1))
        wait_until(lambda: stats(other)["cmd_put"] == "2", DEADLINE_S, "the put is there")
        assert broker.terminate() == 0
        assert one.rest() == []
        broker.go_on()
        broker.start()
        assert bodies(broker, "t") == [b"0", b"1"]


def test_a_refused_put_has_words_for_the_client(tmp_path: Path) -> None:
    """MQ-037: the same through the Python client."""
    with Controlled(tmp_path / "data", "--sync-timeout-ms", "100") as broker, client_of(broker) as client:
        with contextlib.suppress(Refused):  # by a disk that takes as long: stored nevertheless
            client.put("t", b"0")
        broker.stall()
        with pytest.raises(Refused, match=r"refused: stored at [0-9]+ 0 21, not yet disk"):
            client.put("t", b"1")
        broker.go_on()
