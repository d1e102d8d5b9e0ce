"""Garbage on the replication port of a master that has a slave in sync.

Many connections send what no slave sends: random bytes, the reports with which a RocketMQ slave begins, hellos with bytes
changed, lost or added, false lengths, slaves of other brokers, and slaves that claim to have what they were never sent. They
wait for the end, or hang up, or stay open. Meanwhile a real slave follows, and puts wait for it.

What must hold: the log and the set of replicas in sync stay as they are, and nobody but the real slave counts; its connection
is never lost; puts are acknowledged; the process prints no traceback, and memory in use goes down again.

``python -m tests.cluster.replication_garbage --seed 7 --count 100000`` runs it; a failure names the seed and the connection.
"""

import argparse
import contextlib
import errno
import random
import socket
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson

from metaq.replication.frames import LENGTH, MAGIC, REPORT, Hello
from tests.cluster.traffic import try_put
from tests.crash.command import Result
from tests.crash.garbage import LEECHES, MAX_GROWTH_KB, Violation, hang_up, resident_kb, send_some
from tests.support.broker import SEGMENT_BYTES, SOCKET_TIMEOUT_S, wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, check_prefix

WARM_UP_SHARE: Final = 10
"""One in so many frames is sent before memory is measured for the first time."""
CHECK_EVERY: Final = 50
"""Connections between two looks at how the master stands."""
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

Chance = random.Random


class Attack:
    """One master under garbage."""

    def __init__(self, master: ReplicaProcess, slave: ReplicaProcess, seed: int) -> None:
        self._master = master
        self._slave = slave
        self._seed = seed
        self._host, _, port = master.replication.rpartition(":")
        self._port = int(port)
        self._leeches: list[socket.socket] = []
        self._kinds: list[Callable[[Chance], list[bytes]]] = [
            self._noise,
            self._rocketmq,
            self._mutated,
            self._odd_values,
            self._lengths,
            self._claims,
            self._reports,
        ]
        self.details: Counter[str] = Counter()
        self._standing = master.status()

    def run(self, frames: int) -> None:
        """Send so many frames."""
        end = self.details["frames"] + frames
        while self.details["frames"] < end:
            number = self.details["connections"]
            chance = Chance(f"{self._seed}/{number}")
            kind = chance.choice(self._kinds)
            try:
                self._one(chance, kind(chance))
                if number % CHECK_EVERY == 0:
                    self.check()
            except (OSError, AssertionError) as error:
                raise Violation(f"seed {self._seed}, connection {number}, {kind.__name__}: {error}") from error
            self.details[kind.__name__.strip("_").replace("_", " ")] += 1
            self.details["connections"] += 1

    def _one(self, chance: Chance, frames: list[bytes]) -> None:
        connection = socket.create_connection((self._host, self._port), SOCKET_TIMEOUT_S)
        behaviour = chance.choices(("ends", "hangs up", "stays"), (8, 1, 1))[0]
        send_some(connection, b"".join(frames))
        self.details["frames"] += len(frames)
        if behaviour == "hangs up":
            hang_up(connection)
        elif behaviour == "stays":
            self._leeches.append(connection)
            if len(self._leeches) > LEECHES:
                hang_up(self._leeches.pop(chance.randrange(LEECHES)))
        else:
            with connection:
                connection.settimeout(SOCKET_TIMEOUT_S)
                read_to_the_end(connection)
        self.details[behaviour] += 1

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

    def check(self) -> None:
        """Nothing has moved, and puts are taken."""
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
        for words in ("Traceback", f"slave gone address={self._address} "):
            if words in self._master.stderr():
                raise Violation(f"{words!r} in what the master says:\n{self._master.stderr()[-5000:]}")

    @property
    def _address(self) -> str:
        (own,) = [slave for slave in self._standing["slaves"] if slave["replica"] == self._slave.number]
        return str(own["address"])

    def memory_kb(self) -> dict[str, int]:
        """Resident memory when all other connections are closed."""
        for leech in self._leeches:
            hang_up(leech)
        self._leeches.clear()

        def alone() -> bool:
            return [slave["replica"] for slave in self._master.status()["slaves"]] == [self._slave.number]

        wait_until(alone, DEADLINE_S, "all strangers are gone")
        return resident_kb(self._master.pid)

    def close(self) -> None:
        for leech in self._leeches:
            leech.close()


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
        with contextlib.closing(Attack(master, slave, seed)) as attack:
            attack.run(count // WARM_UP_SHARE)
            before = attack.memory_kb()
            attack.run(count - count // WARM_UP_SHARE)
            after = attack.memory_kb()
            attack.check()
        check_prefix(master, slave)
        details = attack.details
    for name in before:
        details[f"{name}_growth_kb"] = after[name] - before[name]
    if max(after[name] - before[name] for name in before) >= MAX_GROWTH_KB:
        raise Violation(f"seed {seed}: memory grew from {before} to {after} kB, more than {MAX_GROWTH_KB} kB")
    return Result("replication_garbage", range(seed, seed + 1), details["frames"], dict(details))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    options = parser.parse_args()
    print(run(options.seed, options.count))


if __name__ == "__main__":
    main()
