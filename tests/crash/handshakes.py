"""Mutated beginnings of connections, as an intruder would send them, against a broker with users.

TLS handshakes, first bytes, logins, signed requests, hellos of slaves and requests of HTTP, each with bytes changed, lost,
added or repeated, from the address of the other clients; beside them, open connections send nothing, or begin and stop.
Meanwhile a client that is logged in puts and reads, and logs in anew.

For half of it the broker checks only a few wrong proofs per minute, which is its default; for the other half it compares every
password, signature and proof.

What must hold: nobody gets in without a valid proof, a slave gets its challenge however many others wait, the process lives and
prints no traceback, the others are served, and memory in use goes down again.

``python -m tests.crash.handshakes --seed 7 --count 100000`` runs it; a failure names the seed and the number of the connection.
"""

import base64
import binascii
import contextlib
import random
import re
import socket
import ssl
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import orjson

import metaq
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import FrameReader, encode_request
from metaq.protocol.remoting.signature import ACCESS_KEY, is_signed_with
from metaq.protocol.text.writing import write_line
from metaq.replication.feeder import MOST_NAMELESS
from metaq.replication.frames import CONTROL, FRAME, HELLO_HEAD, LENGTH, MAGIC, Hello
from metaq.replication.peers import SLAVE, Proof, prove
from tests.crash.attack import main, resident_kb
from tests.crash.command import Result, Violation
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, wait_until
from tests.support.tls import issue
from tests.support.users import ADMIN, GROUP, TOPIC, WRITER, write_users

Chance = random.Random

CHECK_EVERY: Final = 200
WARM_UP: Final = 500
MAX_GROWTH_KB: Final = 30 * 1024
"""Of it some megabytes are the connections and names that are remembered."""
SETTLE_DEADLINE_S: Final = 60.0
FEW: Final = 30
EVERY: Final = 100_000
"""Wrong proofs a minute: as brokers have it by themselves, and more than are said here."""
HELD: Final = 100
HELD_HTTP: Final = 4
"""Connections that say nothing: an HTTP port has room for a few only, each for seconds."""
TOO_MANY: Final = b"too many wrong"
COMPARED: Final = {
    "passwords compared": b"wrong user or password",
    "signatures compared": b"wrong signature",
    "proofs compared": b"does not prove that it is an administrator",
}
"""What is answered to a proof that was looked at."""
METRICS: Final = b"metaq_build_info"
SEND: Final = {"a": "p", "b": TOPIC, "c": "TBW102", "d": "1", "e": "0", "f": "0", "g": "1", "h": "0"}
HELLO: Final = Hello("DefaultCluster", "metaq", 0, 2, 32 << 20, 0, 0, [[0, 0, 0]], None, "127.0.0.1:1", 0).encode()


def mutate(chance: Chance, data: bytes) -> bytes:
    """The same with one to three changes."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at:at] = chance.randbytes(chance.randint(1, 20))
            case 2:
                del changed[at : at + chance.randint(1, 20)]
            case 3:
                del changed[at:]
            case 4:
                changed[at : at + 4] = chance.choice((b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", bytes(4)))
            case _:
                changed += changed[at : at + 200]
    return bytes(changed)


def read_all(connection: socket.socket) -> bytes:
    """Return all that arrives until the broker closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def knows(data: bytes) -> bool:
    """Return whether an HTTP request has a user's secret anywhere, in the clear or in base64."""
    if any(user.secret.encode() in data for user in (WRITER, ADMIN)):
        return True
    proofs = {f"{user.name}:{user.secret}".encode() for user in (WRITER, ADMIN)}
    for word in re.findall(rb"[A-Za-z0-9+/=]+", data):
        with contextlib.suppress(binascii.Error):
            if base64.b64decode(word, validate=True) in proofs:
                return True
    return False


class Attacker:
    """Says one thing after the other."""

    def __init__(self, broker: BrokerProcess, chance: Chance) -> None:
        self._text = (broker.host, broker.port)
        self._replication = address_of(broker.replication)
        self._http = address_of(broker.http)
        self._chance = chance
        self._held: deque[socket.socket] = deque()
        self._held_http: deque[socket.socket] = deque()
        self.answers: Counter[bytes] = Counter()
        """What stood in them."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE
        self.kinds: dict[str, Callable[[], None]] = {
            "first bytes": self.first_bytes,
            "TLS hellos": self.tls_hello,
            "TLS endings": self.tls_ending,
            "logins": self.login,
            "signatures": self.signature,
            "slaves": self.slave,
            "TLS slaves": self.tls_slave,
            "requests of HTTP": self.http,
            "requests of HTTPS": self.https,
            "silences": self.silence,
            "crowds": self.crowd,
        }
        self.weights = [1 if kind == "crowds" else 10 for kind in self.kinds]

    def close(self) -> None:
        for connection in (*self._held, *self._held_http):
            connection.close()

    def _say(self, address: tuple[str, int], data: bytes) -> bytes:
        """Everything that is answered to these bytes, after which nothing comes."""
        with socket.create_connection(address, timeout=SOCKET_TIMEOUT_S) as connection:
            with contextlib.suppress(OSError):  # the broker may have closed it already
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            return self._noted(read_all(connection))

    def _noted(self, answer: bytes) -> bytes:
        self.answers.update(words for words in (TOO_MANY, *COMPARED.values()) if words in answer)
        return answer

    def first_bytes(self) -> None:
        data = self._chance.randbytes(self._chance.randint(1, 40))
        self._say(self._chance.choice((self._text, self._replication, self._http)), data)

    def tls_hello(self) -> None:
        self._say(self._chance.choice((self._text, self._http)), mutate(self._chance, self._client_hello()))

    def tls_slave(self) -> None:
        self._say(self._replication, mutate(self._chance, self._client_hello()))

    def silence(self) -> None:
        """Begin, or not even that, and stay for a while."""
        for held, addresses, most in (
            (self._held, (self._text, self._replication), HELD),
            (self._held_http, (self._http,), HELD_HTTP),
        ):
            held.append(self._begun(self._chance.choice(addresses)))
            if len(held) > most:
                held.popleft().close()

    def _begun(self, address: tuple[str, int]) -> socket.socket:
        connection = socket.create_connection(address, timeout=SOCKET_TIMEOUT_S)
        begins = (b"", b"pu", HELLO[:20], MAGIC + LENGTH.pack(1000), self._client_hello()[:50], b"GET /metrics HT")
        with contextlib.suppress(OSError):  # it may be the one that is dropped
            connection.sendall(self._chance.choice(begins))
        return connection

    def crowd(self) -> None:
        """More at once than a master lets wait for their hello: whoever comes then is asked who it is all the same."""
        with contextlib.ExitStack() as stack:
            for _ in range(MOST_NAMELESS + self._chance.randint(1, 16)):
                stack.enter_context(self._begun(self._replication))
            with socket.create_connection(self._replication, timeout=SOCKET_TIMEOUT_S) as connection:
                connection.sendall(HELLO)
                if b'"challenge"' not in connection.recv(65536):
                    raise Violation("a slave was not asked who it is while others wait")

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def http(self) -> None:
        data = mutate(self._chance, self._request())
        self._check_http(data, self._say(self._http, data))

    def https(self) -> None:
        """A right handshake, and the request in it."""
        data = mutate(self._chance, self._request())
        with (
            socket.create_connection(self._http, timeout=SOCKET_TIMEOUT_S) as connection,
            self._context.wrap_socket(connection, suppress_ragged_eofs=True) as secured,
        ):
            with contextlib.suppress(ConnectionError):
                secured.sendall(data + b"\r\n\r\n")  # which ends it, whatever is lost
            self._check_http(data, self._noted(read_all(secured)))

    def _request(self) -> bytes:
        name, secret = self._chance.choice((WRITER, (WRITER.name, "wrong-secret"), ("nemo", "wrong-secret")))
        basic = base64.b64encode(f"{name}:{secret}".encode()).decode()
        proof = self._chance.choice((f"Basic {basic}", f"Bearer {secret}"))
        return f"GET /metrics HTTP/1.1\r\nHost: broker\r\nAuthorization: {proof}\r\n\r\n".encode()

    def _check_http(self, data: bytes, answer: bytes) -> None:
        if METRICS in answer and not knows(data):
            raise Violation(f"{data!r} was told metrics")

    # -- TLS ----------------------------------------------------------------------------------------------------------

    def _client_hello(self) -> bytes:
        outgoing = ssl.MemoryBIO()
        tls = self._context.wrap_bio(ssl.MemoryBIO(), outgoing)
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        return outgoing.read()

    def tls_ending(self) -> None:
        """A right handshake, whose last message or what follows it is wrong."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._context.wrap_bio(incoming, outgoing)
        with socket.create_connection(self._text, timeout=SOCKET_TIMEOUT_S) as connection:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    connection.sendall(outgoing.read())
                    incoming.write(connection.recv(65536))
            tls.write(write_line("auth", WRITER.name, "wrong-secret", 1))
            with contextlib.suppress(OSError):
                connection.sendall(mutate(self._chance, outgoing.read()))
                connection.shutdown(socket.SHUT_WR)
            read_all(connection)

    # -- proofs -------------------------------------------------------------------------------------------------------

    def login(self) -> None:
        password = self._chance.choice((WRITER.secret, "wrong-secret"))
        data = mutate(self._chance, write_line("auth", WRITER.name, password, 1))
        answer = self._say(self._text, data)
        right = f"auth {WRITER.name} {WRITER.secret}".encode()
        if b"result 200" in answer and right not in data:
            raise Violation(f"{data!r} was answered {answer!r}")

    def signature(self) -> None:
        """Most changes make that it is no frame, so every second one is a frame, with something else than was signed."""
        fields, body = WRITER.signed(SEND, b"body"), b"body"
        if self._chance.random() < 0.5:
            name = self._chance.choice(list(fields))
            fields[name] += self._chance.choice("0=x")
            data = encode_request(Request.SEND_MESSAGE_V2, 1, fields, body)
        else:
            data = mutate(self._chance, encode_request(Request.SEND_MESSAGE_V2, 1, fields, body))
        requests, answers = FrameReader().receive(data), FrameReader().receive(self._say(self._text, data))
        may = sum(
            is_signed_with(user.secret, request.fields, request.body)
            for request in requests
            for user in (WRITER, ADMIN)
            if request.fields.get(ACCESS_KEY) == user.name
        )
        taken = sum(answer.code == Response.SUCCESS and "msgId" in (answer.fields or {}) for answer in answers)
        if taken > may:
            raise Violation(f"{data!r} was stored")

    def slave(self) -> None:
        """A hello, right or not, and then a proof that is not."""
        chance = self._chance
        hello = mutate(chance, HELLO) if chance.random() < 0.5 else HELLO
        with socket.create_connection(self._replication, timeout=SOCKET_TIMEOUT_S) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(hello)
                answer = b""
                if hello is HELLO:
                    answer = connection.recv(65536)
                    challenge = orjson.loads(answer[FRAME.size + LENGTH.size :])["challenge"]
                    proof = prove(ADMIN.secret, SLAVE, challenge, "n", HELLO[HELLO_HEAD:])
                    right = Proof(ADMIN.name, "n", proof).encode()
                    guess = Proof(ADMIN.name, "n", chance.randbytes(32).hex()).encode()
                    wrong = mutate(chance, right) if chance.random() < 0.5 else guess
                    connection.sendall(wrong[: len(right)] if wrong[: len(right)] != right else b"")
                connection.shutdown(socket.SHUT_WR)
            rest = self._noted(read_all(connection))
        if FRAME.pack(0, CONTROL)[8:] in rest and (b'"follow"' in rest or b'"copy"' in rest):
            raise Violation(f"{hello!r} was taken for a slave: {rest!r}")


class Others:
    """Clients that are in, at the same address."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._client = self._connect()
        self._client.put(TOPIC, b"first")

    def _connect(self) -> metaq.TextClient:
        return metaq.TextClient(self._broker.host, self._broker.port, user=ADMIN.name, password=ADMIN.secret)

    def check(self) -> None:
        sent = self._client.put(TOPIC, b"body")
        (message, *_) = self._client.get(TOPIC, position=sent.position, group=GROUP).messages
        if message.body != b"body":
            raise Violation(f"the others read {message.body!r}")
        self._connect().close()

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def guarded(per_minute: int) -> Iterator[BrokerProcess]:
    """A broker with users and a certificate, that looks at so many wrong proofs a minute."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        users = write_users(folder / "users.yaml")
        flags: tuple[str, ...] = ("--users-file", str(users), "--replication-listen", "127.0.0.1:0")
        flags += (*issue(folder).flags, "--failed-logins-per-minute", str(per_minute))
        with BrokerProcess(folder / "data", *flags) as broker:
            yield broker


def run(seed: int, count: int) -> Result:
    """Say ``count`` things, half of them where every proof is compared."""
    chance = Chance(seed)
    done: Counter[str] = Counter()
    for per_minute, part in ((FEW, count // 2), (EVERY, count - count // 2)):
        with (
            guarded(per_minute) as broker,
            contextlib.closing(Others(broker)) as others,
            contextlib.closing(Attacker(broker, chance)) as attacker,
        ):
            try:
                done.update(attack(broker, others, attacker, chance, part))
            except Violation as error:
                raise Violation(f"seed {seed}, {per_minute} wrong proofs a minute: {error}") from error
            if per_minute == EVERY:
                if attacker.answers[TOO_MANY]:
                    raise Violation(f"seed {seed}: {attacker.answers[TOO_MANY]} proofs were not compared")
                done.update({what: attacker.answers[words] for what, words in COMPARED.items()})
    return Result("handshakes", range(seed, seed + 1), count, dict(done))


def attack(broker: BrokerProcess, others: Others, attacker: Attacker, chance: Chance, count: int) -> Counter[str]:
    """Say ``count`` things to one broker; how many of each kind."""
    done: Counter[str] = Counter()
    before_kb = 0
    for number in range(count):
        (kind,) = chance.choices(list(attacker.kinds), attacker.weights)
        try:
            attacker.kinds[kind]()
            if number % CHECK_EVERY == 0:
                others.check()
        except (Violation, OSError, metaq.MetaqError) as error:
            raise Violation(f"connection {number} ({kind}): {error!r}") from error
        done[kind] += 1
        if number == WARM_UP:
            before_kb = resident_kb(broker.pid)["RssAnon"]
    attacker.close()
    others.check()
    log = broker.stderr()
    if "Traceback" in log or not broker.running:
        raise Violation(f"the log holds {log[log.find('Traceback') :][:2000]}")
    if before_kb:
        wait_until(
            lambda: resident_kb(broker.pid)["RssAnon"] - before_kb < MAX_GROWTH_KB, SETTLE_DEADLINE_S, "memory is given back"
        )
    return done


if __name__ == "__main__":
    main(run, count=100_000)
