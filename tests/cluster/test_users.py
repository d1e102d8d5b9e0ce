"""Replicas and registries that have users: slaves, masters and brokers prove who they are, in the clear or over TLS."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from metaq.protocol.remoting.codes import Request, Response
from metaq.replication.frames import CONTROL, FRAME, LENGTH, Hello
from metaq.replication.peers import SLAVE, Proof, prove
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, RegistryProcess, wait_until
from tests.support.tls import Certificates, issue
from tests.support.users import ADMIN, READER, USERS, SigningClient, write_users

DEADLINE_S = 60
HELLO = Hello("DefaultCluster", "metaq", 0, 2, 32 * 1024 * 1024, 0, 0, [[0, 0, 0]], None, "127.0.0.1:1", 0)


def replica(folder: Path, name: str, users: Path | None, *flags: str) -> BrokerProcess:
    """One replica; without users when there is no file."""
    known = () if users is None else ("--users-file", str(users))
    data = folder / name
    return BrokerProcess(data, "--replication-listen", "127.0.0.1:0", *known, *flags)


def slave_of(master: BrokerProcess, folder: Path, name: str, users: Path | None, *flags: str) -> BrokerProcess:
    return replica(folder, name, users, "--role", "slave", "--replica-number", "2", "--master", master.replication, *flags)


def follows(slave: BrokerProcess) -> bool:
    """Return whether the slave has ever followed a master."""
    return " following master=" in slave.stderr().replace("not following", "")


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return issue(tmp_path)


@pytest.fixture
def users(tmp_path: Path) -> Path:
    return write_users(tmp_path / "users.yaml")


@pytest.mark.parametrize("tls", [False, True])
def test_a_slave_that_knows_the_secret_follows(tmp_path: Path, users: Path, certificates: Certificates, tls: bool) -> None:
    """E-05, P33: what is put to the master is read from the slave; the same over TLS."""
    own = ("--cluster-user", ADMIN.name)
    shown = certificates.flags if tls else ()
    trusted = ("--cluster-tls-ca", str(certificates.authority)) if tls else ()
    with replica(tmp_path, "master", users, *own, *shown) as master, contextlib.ExitStack() as stack:
        slave = stack.enter_context(slave_of(master, tmp_path, "slave", users, *own, *trusted))
        fields = {"a": "p", "b": "t", "c": "TBW102", "d": "1", "e": "0", "f": "0", "g": "1", "h": "0"}
        with SigningClient(master.host, master.port, ADMIN) as client:
            for _ in range(100):
                assert client.call(Request.SEND_MESSAGE_V2, fields, b"x" * 10_000).code == Response.SUCCESS
        with SigningClient(slave.host, slave.port, READER) as reader:
            place = {"topic": "t", "queueId": "0"}
            wait_until(
                lambda: reader.call(Request.GET_MAX_OFFSET, place).fields.get("offset") == "100", DEADLINE_S, "all is copied"
            )
        assert follows(slave)


def stranger(tmp_path: Path) -> Path:
    return write_users(tmp_path / "other.yaml", USERS.replace(ADMIN.secret, "another-secret"))


@pytest.mark.parametrize(
    ("knows", "flags", "reason"),
    [
        (None, (), "set cluster_user"),
        ("other", ("--cluster-user", ADMIN.name), "does not prove that it is an administrator"),
        ("users", ("--cluster-user", READER.name), "does not prove that it is an administrator"),
    ],
)
def test_a_slave_that_does_not_is_refused(
    tmp_path: Path, users: Path, knows: str | None, flags: tuple[str, ...], reason: str
) -> None:
    """E-05, P33: without the secret, with another one, or as somebody who is no administrator."""
    file = {None: None, "other": stranger(tmp_path), "users": users}[knows]
    with (
        replica(tmp_path, "master", users, "--failed-logins-per-minute", "1000") as master,
        slave_of(master, tmp_path, "slave", file, *flags) as slave,
    ):
        wait_until(lambda: reason in slave.stderr(), DEADLINE_S, "the slave's log says why")
        assert not follows(slave)
        assert ADMIN.secret not in master.stderr() + slave.stderr()


def test_a_master_that_does_not_is_not_followed(tmp_path: Path, users: Path) -> None:
    """E-05, P33: one without users may be anybody."""
    with (
        replica(tmp_path, "master", None) as master,
        slave_of(master, tmp_path, "slave", users, "--cluster-user", ADMIN.name) as slave,
    ):
        wait_until(lambda: "the master does not prove" in slave.stderr(), DEADLINE_S, "the slave's log says why")
        assert not follows(slave)


def test_a_proof_holds_for_one_connection(tmp_path: Path, users: Path) -> None:
    """E-05: who has seen a proof cannot use it; failures are counted like those of any login."""
    with replica(tmp_path, "master", users, "--failed-logins-per-minute", "5") as master:
        challenges = set()
        old = b""
        for attempt in range(10):
            with connected(master) as connection:
                connection.sendall(HELLO.encode())
                said = read_control(connection)
                challenges.add(said["challenge"])
                hello = HELLO.encode()[12:]
                right = Proof(ADMIN.name, "n", prove(ADMIN.secret, SLAVE, said["challenge"], "n", hello)).encode()
                old = old or right
                connection.sendall(right if attempt == 0 else old)
                answer = read_control(connection)
                assert ("proof" in answer) == (attempt == 0)
                assert ("refused" in answer) == (attempt > 0), answer
        assert len(challenges) == 10
        assert "too many wrong" in answer["refused"]


@contextlib.contextmanager
def connected(master: BrokerProcess) -> Iterator[socket.socket]:
    host, _, port = master.replication.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SOCKET_TIMEOUT_S) as connection:
        yield connection


def read_control(connection: socket.socket) -> dict[str, str]:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = connection.recv(size - len(data))
            assert part, "the master closed the connection"
            data += part
        return data

    _, kind = FRAME.unpack(exactly(FRAME.size))
    assert kind == CONTROL
    content: dict[str, str] = orjson.loads(exactly(LENGTH.unpack(exactly(LENGTH.size))[0]))
    return content


@pytest.mark.parametrize("tls", [False, True])
def test_brokers_register_as_a_user(tmp_path: Path, users: Path, certificates: Certificates, tls: bool) -> None:
    """E-05: with a registry that has users, over TLS too; one without credentials is refused, and says so."""
    shown = certificates.flags if tls else ()
    trusted = ("--cluster-tls-ca", str(certificates.authority)) if tls else ()
    own = ("--users-file", str(users), "--cluster-user", ADMIN.name, *trusted)
    with (
        RegistryProcess(tmp_path / "registry", "--users-file", str(users), *shown) as registry,
        BrokerProcess(tmp_path / "known", "--registries", registry.address, "--broker-name", "known", *own),
        BrokerProcess(tmp_path / "unknown", "--registries", registry.address, "--broker-name", "unknown") as unknown,
        SigningClient(registry.host, registry.port, READER) as client,
    ):
        wait_until(lambda: "anonymous may not" in unknown.stderr(), DEADLINE_S, "the log tells the refusal")
        wait_until(
            lambda: b'"known"' in client.call(Request.GET_BROKER_CLUSTER_INFO).body, DEADLINE_S, "the other one is registered"
        )
        assert b"unknown" not in client.call(Request.GET_BROKER_CLUSTER_INFO).body


def test_a_user_of_the_cluster_needs_a_secret(tmp_path: Path, users: Path) -> None:
    """E-05, E-23: the broker does not start, and says which setting is wrong."""
    process = replica(tmp_path, "master", users, "--cluster-user", "nemo")
    with pytest.raises(AssertionError, match="cluster_user 'nemo'"), process:
        pass
