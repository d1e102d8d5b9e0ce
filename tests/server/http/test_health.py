"""Health over HTTP in each state of a process, where its port is, and metrics that only failures move."""

import http.client
import os
import signal
import socket
import ssl
import time
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.errors import Refused
from metaq.store.messagestore import LOG
from tests.support.broker import BrokerFailed, BrokerProcess, wait_until
from tests.support.metrics import Values, fetch, readiness, value
from tests.support.ports import free_ports
from tests.support.slowdisk import Controlled
from tests.support.talk import Talk
from tests.support.tls import issue

DEADLINE_S: Final = 60.0
STALL_S: Final = 0.3
NOBODY: Final = "127.0.0.1:1"


# -- the port ---------------------------------------------------------------------------------------------------------


def test_the_port_is_above_that_of_listen_unless_it_is_set(tmp_path: Path) -> None:
    """E-02: several brokers on a machine need no setting for it."""
    listen, _ = free_ports(2)
    with BrokerProcess(tmp_path / "data", "--http-listen", "", listen=f"127.0.0.1:{listen}") as broker:
        assert broker.http == f"127.0.0.1:{listen + 1}"
        assert fetch(broker, "/healthz")[0] == 200


def test_none_is_no_port(tmp_path: Path) -> None:
    """E-02: the ready line names none."""
    with BrokerProcess(tmp_path / "data", "--http-listen", "none") as broker:
        assert broker.http == ""
        with TextClient(broker.host, broker.port) as client:
            client.put("t", b"hello")


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("0.0.0.0:0", "http_listen: other machines can reach 0.0.0.0"),
        ("somewhere", "http_listen: 'somewhere' is not HOST:PORT"),
    ],
)
def test_an_address_that_is_refused(tmp_path: Path, where: str, problem: str) -> None:
    """E-02: it is an address as any other."""
    with pytest.raises(BrokerFailed, match=problem), BrokerProcess(tmp_path / "data", "--http-listen", where):
        pass


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """E-02: the setting is named."""
    with BrokerProcess(tmp_path / "one") as broker:
        taken = ("--http-listen", broker.http)
        with (
            pytest.raises(BrokerFailed, match=f"http_listen: cannot take {broker.http}"),
            BrokerProcess(tmp_path / "two", *taken),
        ):
            pass


def test_tls(tmp_path: Path) -> None:
    """E-02, E-05: who begins with TLS is answered by TLS, and a plain request still is."""
    certificate = issue(tmp_path)
    with BrokerProcess(tmp_path / "data", *certificate.flags) as broker:
        context = ssl.create_default_context(cafile=str(certificate.authority))
        host, _, port = broker.http.rpartition(":")
        connection = http.client.HTTPSConnection(host, int(port), timeout=DEADLINE_S, context=context)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b'{"state":"serving"}\n'
        connection.close()
        assert fetch(broker, "/healthz")[0] == 200


def test_a_handshake_that_does_not_go_on_stops_nobody(tmp_path: Path) -> None:
    """E-02: one byte of it and silence, on a port with TLS: health and puts are answered meanwhile."""
    certificate = issue(tmp_path)
    with BrokerProcess(tmp_path / "data", *certificate.flags) as broker:
        host, _, port = broker.http.rpartition(":")
        with socket.create_connection((host, int(port))) as silent, TextClient(broker.host, broker.port) as client:
            silent.sendall(b"\x16")
            for _ in range(3):  # whichever of them comes first
                client.put("t", b"hello")
                assert fetch(broker, "/healthz")[0] == 200


# -- states -----------------------------------------------------------------------------------------------------------


def test_a_disk_without_room(tmp_path: Path) -> None:
    """E-02, P12, P39: not ready, with the reason that a put hears, and counted."""
    with BrokerProcess(tmp_path / "data", "--least-free-bytes", str(1 << 60)) as broker:
        with TextClient(broker.host, broker.port) as client, pytest.raises(Refused) as refused:
            client.put("t", b"hello")
        (reason,) = readiness(broker)["reasons"]
        assert reason in str(refused.value)
        found = Values(broker)
        assert found.get("metaq_puts_refused_total", {"reason": "disk_full"}) == 1
        assert (found.get("metaq_ready"), found.get("metaq_writable"), found.get("metaq_registered")) == (0, 0, 1)
        assert fetch(broker, "/healthz")[0] == 200


def test_a_replica_without_zookeeper(tmp_path: Path) -> None:
    """E-02: it serves nobody, and says what it waits for."""
    flags = ("--role", "elected", "--zookeeper", NOBODY, "--replication-listen", "127.0.0.1:0")
    with BrokerProcess(tmp_path / "data", *flags) as broker:
        found = readiness(broker)
        assert found["role"] == "slave"
        follows, unseen = found["reasons"]
        assert follows.startswith("this slave follows no master")
        assert unseen == f"not connected to ZooKeeper {NOBODY}"
        assert value(broker, "metaq_registered") == 0
        assert fetch(broker, "/healthz")[0] == 200


def test_a_broker_that_stops(tmp_path: Path) -> None:
    """E-02: alive and not ready until the last answer is sent."""
    with Controlled(tmp_path / "data", "--drain-timeout-ms", "60000") as broker, Talk(broker) as talk:
        talk.placed("t", b"hello")
        broker.stall()
        talk.send(talk.put_of("t", b"later", None))
        wait_until(lambda: value(broker, "metaq_waiting_bytes") > 0, DEADLINE_S, "the put waits")
        os.kill(broker.pid, signal.SIGTERM)
        wait_until(lambda: readiness(broker)["state"] == "stopping", DEADLINE_S, "it stops")
        assert readiness(broker)["reasons"] == ["the process stops"]
        assert fetch(broker, "/healthz")[0] == fetch(broker, "/metrics")[0] == 200
        broker.go_on()
        assert talk.replies(1)[0].code == 200
        wait_until(lambda: not broker.running, DEADLINE_S, "it has stopped")


# -- metrics that only failures move ----------------------------------------------------------------------------------


def test_a_loop_that_stands_still(tmp_path: Path) -> None:
    """E-01: however short, it is seen afterwards."""
    with BrokerProcess(tmp_path / "data") as broker:

        def stalls() -> float:
            found = Values(broker)
            return found.get("metaq_loop_stall_seconds_count") - found.get("metaq_loop_stall_seconds_bucket", {"le": "0.1"})

        before = stalls()
        os.kill(broker.pid, signal.SIGSTOP)
        time.sleep(STALL_S)
        os.kill(broker.pid, signal.SIGCONT)
        wait_until(lambda: stalls() > before, DEADLINE_S, "the stall is counted")


def test_reads_from_the_disk(tmp_path: Path) -> None:
    """E-01: what was not in memory, and what was damaged."""
    with Controlled(tmp_path / "data", "--hot-bytes", "0") as broker:
        with Talk(broker) as talk:
            placed = [talk.placed("t", b"hello"), talk.placed("t", b"again")]
        (tmp_path / "cold").touch()
        with TextClient(broker.host, broker.port) as client:
            assert [message.body for message in client.get("t", position=0).messages] == [b"hello", b"again"]
            assert value(broker, "metaq_cold_reads_total") >= 1
            assert value(broker, "metaq_damaged_reads_total") == 0
            (segment,) = [path for path in (broker.data / LOG).iterdir() if path.name.isdecimal() and int(path.name) == 0]
            with segment.open("r+b") as file:
                at = file.read(4096).index(b"hello")
                file.seek(at)
                file.write(b"jelly")
            behind = client.get("t", position=0)  # where the next intact message is
            assert (behind.messages, behind.next_position) == ([], placed[1].position)
        assert value(broker, "metaq_damaged_reads_total") >= 1
        assert value(broker, "metaq_cold_reads_waiting") == 0
