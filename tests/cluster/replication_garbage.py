"""Garbage on the replication port of a master that has a slave in sync.

Many connections send what no slave sends: random bytes, the reports with which a RocketMQ slave begins, hellos with bytes
changed, lost or added, false lengths, slaves of other brokers, and slaves that claim to have what they were never sent. They
wait for the end, or hang up, or stay open. Meanwhile a real slave follows, and puts wait for it.

What must hold: the log and the set of replicas in sync stay as they are, and nobody but the real slave counts; its connection
is never lost; puts are acknowledged; the process prints no traceback, and memory in use goes down again.

``python -m tests.cluster.replication_garbage --seed 7 --count 100000`` runs it; a failure names the seed and the connection.
"""

import contextlib
import errno
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from metaq.replication.frames import LENGTH, MAGIC, REPORT, Hello
from tests.cluster.traffic import try_put
from tests.crash.attack import Attack, Chance, hang_up, main, send_some
from tests.crash.command import Result, Violation
from tests.support.broker import SEGMENT_BYTES, SOCKET_TIMEOUT_S, wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, check_prefix

STRANGER: Final = 9
"""Number of a replica that is none."""
NUMBERS: Final = [0, 1, 2, -1, -(1 << 63), (1 << 63) - 1, 1 << 31, 1 << 40, 255]
VALUES: Final[list[Any]] = [
    None,
    True,
    "",
    "x" * 5000,
    -1,
    0,
    1.5,
    1 << 62,
    [],
    [1],
    [[1, 2]],
    {},
    {"a": []},
    [[0, 0, 0]] * 2000,
]


class Said(NamedTuple):
    """What one connection says."""

    kind: str
    frames: list[bytes]


class ReplicationAttack(Attack[Said]):
    """One master under garbage, while a real slave follows it."""

    check_every = 50

    def __init__(self, master: ReplicaProcess, slave: ReplicaProcess, seed: int) -> None:
        super().__init__(master, seed)
        self._master = master
        self._slave = slave
        self._host, _, port = master.replication.rpartition(":")
        self._port = int(port)
        self._kinds: list[Callable[[Chance], list[bytes]]] = [
            self._noise,
            self._rocketmq,
            self._mutated,
            self._odd_values,
            self._lengths,
            self._claims,
            self._reports,
        ]
        self._standing = master.status()

    def draw(self, chance: Chance) -> Said:
        kind = chance.choice(self._kinds)
        return Said(kind.__name__.strip("_").replace("_", " "), kind(chance))

    def shown(self, drawn: Said) -> bytes:
        return b"".join(drawn.frames)

    def attack(self, chance: Chance, drawn: Said) -> int:
        """One connection: it waits for the end, or hangs up, or stays."""
        connection = socket.create_connection((self._host, self._port), SOCKET_TIMEOUT_S)
        behaviour = chance.choices(("ends", "hangs up", "stays"), (8, 1, 1))[0]
        send_some(connection, b"".join(drawn.frames))
        if behaviour == "hangs up":
            hang_up(connection)
        elif behaviour == "stays":
            self.stay(chance, connection)
        else:
            with connection:
                connection.settimeout(SOCKET_TIMEOUT_S)
                read_to_the_end(connection)
        self.details.update((behaviour, drawn.kind))
        return len(drawn.frames)

    # -- what is said -------------------------------------------------------------------------------------------------

    def _noise(self, chance: Chance) -> list[bytes]:
        return [chance.randbytes(chance.randrange(1, 200)) for _ in range(chance.randrange(1, 5))]

    def _rocketmq(self, chance: Chance) -> list[bytes]:
        """A slave of RocketMQ reports an offset at once, and again and again."""
        return [struct.pack(">q", chance.choice(NUMBERS)) for _ in range(chance.randrange(1, 40))]

    def _hello(self, **changed: object) -> bytes:
        """Return a hello that an impostor could send truthfully: it has no data."""
        known = self._standing
        said: dict[str, Any] = {
            "cluster": "DefaultCluster",
            "broker_name": "metaq",
            "broker_number": 0,
            "replica": STRANGER,
            "segment_bytes": SEGMENT_BYTES,
            "begin": 0,
            "end": 0,
            "epochs": [[1, 0, 0], [known["epoch"], 0, 1]],
            "last": None,
            "text": "10.0.0.9:8123",
            "proved": changed.get("end", 0),
            "ranges": [],
        }
        return Hello(**{**said, **changed}).encode()

    def _mutated(self, chance: Chance) -> list[bytes]:
        """Return a mutated hello of another cluster, so that one that stays valid has no effect; then wild reports."""
        data = bytearray(self._hello(cluster=f"other {chance.random()}"))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0 if at < len(data):
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    del data[at : at + chance.randrange(1, 8)]
                case 2:
                    data[at:at] = chance.randbytes(4)
                case _:
                    del data[at:]
                    data += b"\0"
        return [bytes(data) or b"\0", *self._wild_reports(chance)]

    def _odd_values(self, chance: Chance) -> list[bytes]:
        """A hello with a value of another kind, or with a member too many or too few."""
        said = orjson.loads(self._hello(cluster="other")[len(MAGIC) + LENGTH.size :])
        name = chance.choice([*said, "more"])
        if chance.random() < 0.2:
            said.pop(name, None)
        else:
            said[name] = chance.choice(VALUES)
        said["cluster"] = said.get("cluster") if name == "cluster" else "other"
        body = orjson.dumps(said)
        return [MAGIC + LENGTH.pack(len(body)) + body, *self._wild_reports(chance)]

    def _lengths(self, chance: Chance) -> list[bytes]:
        """A length that is not that of the body."""
        body = self._hello()[len(MAGIC) + LENGTH.size :]
        length = chance.choice([-1, 0, 1, len(body) - 1, len(body) + 1, 256 * 1024, 256 * 1024 + 1, (1 << 31) - 1, -(1 << 31)])
        return [MAGIC + LENGTH.pack(length) + (body if length != len(body) - 1 else body[:-1])]

    def _claims(self, chance: Chance) -> list[bytes]:
        """To have all of the log, or more, without its last record."""
        end = self._standing["end"]
        changes: list[dict[str, object]] = [
            {"end": end},
            {"end": end, "last": [end - 155, 155, "crc"]},
            {"end": end, "last": [chance.randrange(-5, 2 * end), chance.choice(NUMBERS[:6]), "00000000"]},
            {"end": end + chance.randrange(1, 1000), "last": [end, 113, "00000000"]},
            {"end": end, "epochs": [[self._standing["epoch"] + 1, 0, 1]]},
            {"end": end, "epochs": []},
            {"replica": 1, "end": end},
        ]
        return [self._hello(**chance.choice(changes)), *self._wild_reports(chance)]

    def _reports(self, chance: Chance) -> list[bytes]:
        """Return a hello that is accepted, since it says that the slave has no data; then reports of data never sent to it."""
        return [self._hello(), *self._wild_reports(chance)]

    def _wild_reports(self, chance: Chance) -> list[bytes]:
        beyond = self._standing["end"] + (1 << 20)
        offsets = [chance.choice([-1, -(1 << 63), (1 << 63) - 1, beyond + chance.randrange(1 << 40)]) for _ in range(10)]
        return [REPORT.pack(offset) for offset in offsets[: chance.randrange(11)]]

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self, chance: Chance) -> None:
        """Nothing has moved, puts are taken, and the slave's connection was never lost."""
        status = self._master.status()
        for name in ("in_sync", "begin", "end", "readable_end", "epoch"):
            if status[name] != self._standing[name]:
                raise Violation(f"{name} is {status[name]} after {self._standing[name]}")
        wrong = [slave for slave in status["slaves"] if slave["replica"] != self._slave.number and slave["held_end"] != 0]
        if wrong:
            raise Violation(f"a stranger holds something: {wrong}")
        answer = try_put(self._master, b"x" * 50)
        if answer != (200, ""):
            raise Violation(f"a put was answered with {answer}")
        self._standing = self._master.status()
        self.details["puts"] += 1
        (own,) = [slave for slave in self._standing["slaves"] if slave["replica"] == self._slave.number]
        if f"slave gone address={own['address']} " in self._master.stderr():
            raise Violation(f"the real slave was lost:\n{self._master.stderr()[-5000:]}")

    def settle(self) -> None:
        def alone() -> bool:
            return [slave["replica"] for slave in self._master.status()["slaves"]] == [self._slave.number]

        wait_until(alone, DEADLINE_S, "all strangers are gone")


def read_to_the_end(connection: socket.socket) -> None:
    """Say no more, and wait until the other side has no more to say; ``TimeoutError``."""
    try:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    except OSError as error:
        if error.errno not in (errno.ECONNRESET, errno.ENOTCONN):
            raise


def run(seed: int, count: int) -> Result:
    """Send ``count`` frames; ``Violation`` when the master breaks a promise."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), "--replica-lag-ms", "30000", "--replica-timeout-ms", "30000") as cluster,
    ):
        master, slave = cluster.pair()
        assert try_put(master, b"before") == (200, "")
        with contextlib.closing(ReplicationAttack(master, slave, seed)) as attack:
            attack.run_within(count)
            attack.check(Chance(seed))
        check_prefix(master, slave)
    return Result("replication_garbage", range(seed, seed + 1), attack.details["frames"], dict(attack.details))


if __name__ == "__main__":
    main(run, count=10_000)
