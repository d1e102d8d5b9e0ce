"""Users of a broker: the Python clients and the command line with a login, over TLS, and while the users file changes."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import metaq
import metaq.aio
import metaq.client.xa
from metaq.config import load
from metaq.errors import BadRequest, ConfigError, ConnectionFailed, MetaqError, Refused, SendFailed
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.text.writing import write_line
from metaq.server.wire.listeners import resolve
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.tls import Certificates, issue
from tests.support.users import ADMIN, GROUP, READER, TOPIC, USERS, WRITER, SigningClient, write_users

SECRETS = (ADMIN.secret, READER.secret, WRITER.secret)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("users")


@pytest.fixture(scope="module")
def certificates(folder: Path) -> Certificates:
    return issue(folder)


@pytest.fixture(scope="module")
def broker(folder: Path, certificates: Certificates) -> Iterator[BrokerProcess]:
    users = write_users(folder / "users.yaml")
    with BrokerProcess(folder / "data", "--users-file", str(users), *certificates.flags) as process:
        with SigningClient(process.host, process.port, ADMIN) as client:
            fields = {"topic": TOPIC, "readQueueNums": "1", "writeQueueNums": "1", "perm": "6", "defaultTopic": "TBW102"}
            fields |= {"topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false"}
            assert client.call(Request.UPDATE_AND_CREATE_TOPIC, fields).code == Response.SUCCESS
        yield process


@pytest.mark.parametrize("tls", [False, True])
def test_python_clients_with_a_user(broker: BrokerProcess, certificates: Certificates, tls: bool) -> None:
    """E-05: what one may send, the other one reads; by way of the registry, which knows the same users."""
    ca = str(certificates.authority) if tls else False
    body = f"tls {tls}".encode()
    with metaq.connect(broker.registry, user="writer", password=WRITER.secret, tls=ca) as client:
        client.producer().send(TOPIC, body)
        with pytest.raises(Refused, match="writer may not") as caught:
            client.admin().delete_topic(TOPIC)
        assert caught.value.code == Response.NO_PERMISSION
    url = f"metaq://reader:{quote(READER.secret)}@{broker.registry}/" + (f"?tls={quote(str(ca))}" if tls else "")
    with metaq.connect(url) as client:
        with client.consumer(TOPIC, GROUP, consume_from=metaq.ConsumeFrom.FIRST) as consumer:
            message = next(message for message in consumer if message.body == body)
            consumer.commit()
        assert message.topic == TOPIC
        with pytest.raises((SendFailed, Refused), match="reader may not publish to t"):
            client.producer().send(TOPIC, b"no")


def test_python_clients_that_may_not(broker: BrokerProcess, certificates: Certificates) -> None:
    """E-05, P33: no user, a wrong password, a certificate that nobody vouches for."""
    with metaq.connect(broker.registry) as client, pytest.raises(MetaqError, match="anonymous may not"):
        client.producer().send(TOPIC, b"no")
    with metaq.connect(broker.registry, user="writer", password="wrong-secret") as client:
        with pytest.raises(MetaqError, match="wrong signature") as caught:
            client.producer().send(TOPIC, b"no")
        assert "wrong-secret" not in str(caught.value)
    untrusting = metaq.connect(broker.registry, user="writer", password=WRITER.secret, tls=True)
    with untrusting as client, pytest.raises(MetaqError, match="certificate verify failed"):
        client.producer().send(TOPIC, b"no")
    with pytest.raises(BadRequest, match="give both a user and a password"):
        metaq.connect(f"metaq://writer@{broker.registry}/")
    with pytest.raises(BadRequest) as refused:
        metaq.connect(f"metaq://writer:{WRITER.secret}@{broker.registry}/?color=red")
    assert WRITER.secret not in str(refused.value)


@pytest.mark.parametrize("tls", [False, True])
def test_the_text_client_with_a_user(broker: BrokerProcess, certificates: Certificates, tls: bool) -> None:
    """E-05: it logs in again with each new connection; many threads share one over TLS."""
    ca = str(certificates.authority) if tls else False
    with metaq.TextClient(broker.host, broker.port, user="writer", password=WRITER.secret, tls=ca) as client:
        bodies = [b"%d" % number * 1000 for number in range(300)]
        assert len(client.put_many(TOPIC, bodies)) == 300
        threads = [threading.Thread(target=client.put_many, args=(TOPIC, bodies)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client._connection.lose("a test")
        client.put(TOPIC, b"again")
        with pytest.raises(Refused, match="writer may not read t") as caught:
            client.get(TOPIC)
        assert caught.value.code == 403
    with pytest.raises(Refused, match="wrong user or password") as wrong:
        metaq.TextClient(broker.host, broker.port, user="writer", password="wrong-secret", tls=ca)
    assert wrong.value.code == 403
    for word in ("two words", "a line\r\n", "a\ttab"):
        with pytest.raises(BadRequest, match="the password cannot log in") as caught_word:
            metaq.TextClient(broker.host, broker.port, user="writer", password=word, tls=ca)
        assert word not in str(caught_word.value)


def test_a_password_beyond_ascii(tmp_path: Path) -> None:
    """E-05: is UTF-8, from the client as from telnet; and what is not is refused without a guess."""
    secret = "geheïm-пароль"
    users = write_users(tmp_path / "users.yaml", USERS.replace(WRITER.secret, secret))
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker:
        with metaq.TextClient(broker.host, broker.port, user="writer", password=secret) as client:
            client.put(TOPIC, b"x")
        with broker.connect() as connection, connection.makefile("rb") as replies:
            connection.sendall("auth writer geheïm 7\r\n".encode("latin-1"))
            text = b"the password is not UTF-8"
            assert replies.readline() == b"result 400 %d 7\r\n" % len(text)
            assert replies.read(len(text)) == text


def test_branches_with_a_user(broker: BrokerProcess, certificates: Certificates) -> None:
    """E-05: the XA session logs in, and who may publish nowhere can begin nothing."""
    ca = str(certificates.authority)
    with metaq.client.xa.connect(broker.address, user="writer", password=WRITER.secret, tls=ca) as session:
        xid = session.xid(1, "order-1", "metaq")
        session.tpc_begin(xid)
        session.send(TOPIC, b"in a branch")
        session.tpc_prepare()
        session.tpc_commit()
    of_reader = metaq.client.xa.connect(broker.address, user="reader", password=READER.secret)
    with of_reader as session, pytest.raises(MetaqError, match="reader may not"):
        session.tpc_begin(session.xid(1, "order-2", "metaq"))


def test_tls_without_a_certificate(tmp_path: Path, certificates: Certificates) -> None:
    """E-05: says what may be missing."""
    with BrokerProcess(tmp_path / "data") as plain, pytest.raises(ConnectionFailed, match="tls_certificate"):
        metaq.TextClient(plain.host, plain.port, tls=str(certificates.authority))


# -- the command line -------------------------------------------------------------------------------------------------


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
    command = [sys.executable, "-m", "metaq", *arguments]
    return subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL
    )


def test_commands_as_a_user(broker: BrokerProcess, certificates: Certificates) -> None:
    """E-05: by registry and by broker; the password comes from the environment."""
    ca = ("--tls-ca", str(certificates.authority))
    here = {"METAQ_REGISTRY": broker.registry, "METAQ_PASSWORD": ADMIN.secret}
    listed = run(*ca, "--user", "admin", "topic", "list", "--json", **here)
    assert [json.loads(line)["topic"] for line in listed.stdout.splitlines()] == [TOPIC], listed.stderr
    put = run("put", TOPIC, "hello", METAQ_BROKER=broker.address, METAQ_USER="writer", METAQ_PASSWORD=WRITER.secret)
    assert put.returncode == 0, put.stderr
    file = {"METAQ_USER": "writer", "METAQ_USERS_FILE": str(broker.data.parent / "users.yaml")}
    from_file = run("put", TOPIC, "hello", METAQ_BROKER=broker.address, **file)
    assert from_file.returncode == 0, from_file.stderr
    nobody = run("put", TOPIC, "hello", METAQ_BROKER=broker.address, **{**file, "METAQ_USER": "nemo"})
    assert "--user 'nemo' is not a user with a secret in the users file" in nobody.stderr
    refused = run("topic", "list", METAQ_REGISTRY=broker.registry)
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "anonymous may not" in refused.stderr
    wrong = run("put", TOPIC, "hello", METAQ_BROKER=broker.address, METAQ_USER="writer", METAQ_PASSWORD="wrong-secret")
    assert wrong.returncode == 4
    assert "wrong-secret" not in wrong.stderr


@pytest.mark.slow
def test_commands_that_edit_users(tmp_path: Path) -> None:
    """E-05, E-06: what they write is what a broker reads; passwords are neither arguments nor shown."""
    file = tmp_path / "users.yaml"
    named = {"METAQ_USERS_FILE": str(file)}
    assert run("user", "add", "root", "--admin", METAQ_PASSWORD="root-secret", **named).returncode == 0
    generated = run("user", "add", "billing", "--generate", **named).stdout.strip()
    assert run("user", "add", "ann", "--hash", METAQ_PASSWORD="ann-password", **named).returncode == 0
    grants = ("--topic", "orders=SUB", "--topic", "audit-*=PUB|CREATE", "--group", "billing=SUB")
    assert run("user", "permit", "billing", *grants, **named).returncode == 0
    assert run("user", "permit", "anonymous", "--topic", "news=SUB", "--group", "*=SUB", **named).returncode == 0
    rows = {row["user"]: row for row in map(json.loads, run("user", "list", "--json", **named).stdout.splitlines())}
    assert rows["root"]["admin"] and not rows["billing"]["admin"]
    assert rows["billing"]["topics"] == ["orders=SUB", "audit-*=PUB|CREATE"]
    assert {name: row["password"] for name, row in rows.items()} == {
        "root": "secret",
        "billing": "secret",
        "ann": "hash",
        "anonymous": "none",
    }
    with BrokerProcess(tmp_path / "data", "--users-file", str(file)) as broker:
        for name, password in (("root", "root-secret"), ("billing", generated), ("ann", "ann-password")):
            metaq.TextClient(broker.host, broker.port, user=name, password=password).close()
        assert run("user", "permit", "billing", "--topic", "orders=", **named).returncode == 0
        assert run("user", "remove", "ann", **named).returncode == 0
        wait_until(lambda: is_refused(broker, "ann", "ann-password"), 30, "it is unknown")
    assert run("user", "remove", "ann", **named).returncode == 1
    for wrong in (("permit", "nemo"), ("permit", "billing", "--topic", "orders"), ("add", "a b"), ("add", "anonymous")):
        failed = run("user", *wrong, METAQ_PASSWORD="root-secret", **named)
        assert failed.returncode == 2, wrong
    assert "root-secret" not in run("user", "list", **named).stdout


def is_refused(broker: BrokerProcess, user: str, password: str) -> bool:
    """Return whether the user cannot log in with this password."""
    try:
        metaq.TextClient(broker.host, broker.port, user=user, password=password).close()
    except Refused:
        return True
    return False


# -- reloading --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_users_change_under_load(tmp_path: Path) -> None:
    """E-05: whoever may go on is not disturbed, who may no more is refused at once, on connections that are open.

    Who is removed and added again has to log in again: it may be somebody else.
    """
    users = write_users(tmp_path / "users.yaml")
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker, contextlib.ExitStack() as stack:
        admin = stack.enter_context(metaq.TextClient(broker.host, broker.port, user="admin", password=ADMIN.secret))
        writer = stack.enter_context(metaq.TextClient(broker.host, broker.port, user="writer", password=WRITER.secret))
        ended, failed = threading.Event(), []

        def load() -> None:
            signing = stack.enter_context(metaq.connect(broker.registry, user="admin", password=ADMIN.secret))
            producer = signing.producer()
            while not ended.is_set():
                try:
                    admin.put(TOPIC, b"x")
                    producer.send(TOPIC, b"y")
                except MetaqError as error:
                    failed.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        without = USERS.replace("PUB|CREATE", "SUB")
        for text, may in ((without, False), (USERS, True)) * 2:
            write_users(users, text)
            wait_until(lambda may=may: can_put(writer) is may, 30, f"the writer may put: {may}")  # type: ignore[misc]
        write_users(users, USERS.replace("writer:", "writer2:"))
        wait_until(lambda: not can_put(writer), 30, "the writer may put nothing")
        write_users(users, USERS)
        wait_until(lambda: has_login(broker), 30, "the writer can log in again")
        assert not can_put(writer)
        ended.set()
        thread.join()
        assert failed == []
        assert broker.running


def has_login(broker: BrokerProcess) -> bool:
    with (
        contextlib.suppress(Refused),
        metaq.TextClient(broker.host, broker.port, user="writer", password=WRITER.secret) as again,
    ):
        return can_put(again)
    return False


def can_put(client: metaq.TextClient) -> bool:
    try:
        client.put(TOPIC, b"z")
    except Refused as error:
        assert error.code == 403
        return False
    return True


@pytest.mark.parametrize("text", ["users: {admin: {secret: [", "users: {admin: {secret: hush-hush, colour: red}}", None])
def test_a_bad_file_keeps_the_users(tmp_path: Path, text: str | None) -> None:
    """E-05: and the log says why, once, without the secret that stands there; a good one is taken again."""
    users = write_users(tmp_path / "users.yaml")
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker:
        if text is None:
            users.unlink()
        else:
            write_users(users, text)
        os.kill(broker.pid, signal.SIGHUP)
        wait_until(lambda: "users not reloaded" in broker.stderr(), 30, "the log tells it")
        metaq.TextClient(broker.host, broker.port, user="admin", password=ADMIN.secret).close()
        write_users(users, USERS.replace("  admin:", "  root:"))
        wait_until(lambda: "users reloaded" in broker.stderr(), 30, "the log tells it")
        metaq.TextClient(broker.host, broker.port, user="root", password=ADMIN.secret).close()
        assert broker.stderr().count("users not reloaded") == 1
        assert "hush-hush" not in broker.stderr()


def test_a_broker_does_not_start_with_a_bad_file(tmp_path: Path) -> None:
    """E-05: neither without the file, nor when others can read it."""
    users = write_users(tmp_path / "users.yaml")
    users.chmod(0o644)
    started = run("serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--users-file", str(users))
    assert started.returncode == 1
    assert "chmod 600" in started.stderr


# -- limits -----------------------------------------------------------------------------------------------------------


def test_strangers_do_not_keep_users_out(tmp_path: Path) -> None:
    """E-05, E-15: at the limit of connections those go that have not logged in, the longest silent first; never a user."""
    users = write_users(tmp_path / "users.yaml")
    flags = ("--users-file", str(users), "--max-connections", "3")
    with BrokerProcess(tmp_path / "data", *flags) as broker, contextlib.ExitStack() as stack:

        def log_in() -> metaq.TextClient:
            client = metaq.TextClient(broker.host, broker.port, user="admin", password=ADMIN.secret)
            return stack.enter_context(client)

        first = log_in()
        # the broker itself may still hold a connection, over which it checks its advertised address
        wait_until(lambda: "curr_connections 1\r\n" in first.stats(), 30, "nobody else is connected")
        strangers = [stack.enter_context(broker.connect()) for _ in range(2)]
        wait_until(lambda: "curr_connections 3\r\n" in first.stats(), 30, "the strangers are connected")
        second = log_in()
        assert strangers[0].recv(1) == b""
        third = log_in()
        assert strangers[1].recv(1) == b""
        with broker.connect() as last:
            assert last.recv(100).startswith(b"result 503 ")
        for user in (first, second, third):
            assert user.version()


def test_passwords_cannot_be_guessed_fast(tmp_path: Path) -> None:
    """E-05, P33: after so many failures none is looked at, be the password right; who has logged in goes on."""
    users = write_users(tmp_path / "users.yaml")
    flags = ("--users-file", str(users), "--failed-logins-per-minute", "5")
    with BrokerProcess(tmp_path / "data", *flags) as broker, contextlib.ExitStack() as stack:
        writer = metaq.TextClient(broker.host, broker.port, user="writer", password=WRITER.secret)
        stack.enter_context(writer)
        texts = []
        with broker.connect() as connection, connection.makefile("rb") as replies:
            for number in itertools.chain(range(100), [READER.secret]):
                connection.sendall(write_line("auth", "reader", str(number), 1))
                texts.append(replies.read(int(replies.readline().split()[2])))
        looked_at = texts.count(b"wrong user or password")
        assert 5 <= looked_at <= 5 + 5  # more while a slow machine counts the minute
        assert b"too many wrong" in texts[-1]
        with SigningClient(broker.host, broker.port, ADMIN) as client:
            answer = client.call(Request.GET_BROKER_RUNTIME_INFO)
            assert (answer.code, "too many wrong" in str(answer.remark)) == (Response.NO_PERMISSION, True)
        writer.put(TOPIC, b"x")
        metaq.TextClient(broker.host, broker.port, user="writer", password=WRITER.secret).close()


def test_secrets_are_not_told(broker: BrokerProcess) -> None:
    """E-05: neither in statistics nor in settings, nor in the log."""
    with metaq.TextClient(broker.host, broker.port, user="admin", password=ADMIN.secret) as client:
        told = client.stats() + client.stats("config")
    with SigningClient(broker.host, broker.port, ADMIN) as signing:
        for code in (Request.GET_BROKER_CONFIG, Request.GET_BROKER_RUNTIME_INFO, Request.GET_NAMESRV_CONFIG):
            told += signing.call(code).body.decode()
    assert not [secret for secret in SECRETS if secret in told + broker.stderr()]


def test_a_public_address_needs_users_or_the_word(tmp_path: Path) -> None:
    """E-05, P21: a wildcard address, too."""
    users = str(write_users(tmp_path / "users.yaml"))
    with pytest.raises(ConfigError, match="users_file"):
        resolve("listen", "0.0.0.0:0", load(None, {}, {}))
    assert resolve("listen", "0.0.0.0:0", load(None, {}, {"users_file": users})) == ("0.0.0.0", 0)
    assert resolve("listen", "0.0.0.0:0", load(None, {}, {"allow_public": True})) == ("0.0.0.0", 0)


def test_a_registry_with_users(tmp_path: Path) -> None:
    """E-05: who asks it signs, and telnet logs in."""
    users = write_users(tmp_path / "users.yaml")
    with RegistryProcess(tmp_path / "registry", "--users-file", str(users)) as registry:
        with metaq.TextClient(registry.host, registry.port, user="reader", password=READER.secret) as client:
            assert "brokers 0" in client.stats()
        with metaq.TextClient(registry.host, registry.port) as client, pytest.raises(Refused, match="anonymous may not"):
            client.stats()
        with SigningClient(registry.host, registry.port, READER) as signing:
            assert signing.call(Request.GET_BROKER_CLUSTER_INFO).code == Response.SUCCESS
            assert signing.call(Request.REGISTER_BROKER).code == Response.NO_PERMISSION


def test_a_registry_reads_its_users_again(tmp_path: Path) -> None:
    """E-05: also after a file that it could not read; until then the users stay as they were."""
    users = write_users(tmp_path / "users.yaml")
    with (
        RegistryProcess(tmp_path / "registry", "--users-file", str(users)) as registry,
        SigningClient(registry.host, registry.port, READER) as signing,
    ):
        assert signing.call(Request.GET_BROKER_CLUSTER_INFO).code == Response.SUCCESS
        write_users(users, f"{USERS}  ann: {{secret: 1234-56-78}}\n")
        wait_until(lambda: "users not reloaded" in registry.stderr(), 30, "the registry has looked at the file")
        assert signing.call(Request.GET_BROKER_CLUSTER_INFO).code == Response.SUCCESS
        write_users(users, USERS.replace(f"{READER.name}:", "other:"))
        wait_until(
            lambda: signing.call(Request.GET_BROKER_CLUSTER_INFO).code == Response.NO_PERMISSION,
            30,
            "the user has no rights any more",
        )
        assert "1234-56-78" not in registry.stderr()
