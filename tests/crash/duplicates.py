"""SIGKILL while producers send messages with ids, and send again what had no answer, as RocketMQ's producers do.

A case is the life of one data folder, which outlives many kills. Each sender draws ids, some of them many times, sends
several at once on one connection, and keeps each answer. What had no answer is sent again after the start, to any partition.
Between a kill and the next start the folder ``dedupeindex`` may be deleted, or put back as it was before.

What must hold: all answers to one id are equal (D-1); each id that was answered has exactly one record, at the place of the
answer, and no id has two (D-1, D-2).

``python -m tests.crash.duplicates --seed 7 --count 1000 --workers 2`` runs it. A failure names the seed. A seed draws the same
settings and the same work again, but not the same instants, as processes and disks are not deterministic.
"""

import random
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

from metaq.protocol.properties import UNIQUE_KEY
from metaq.protocol.remoting.codes import Request, Response
from tests.crash.command import expect
from tests.crash.lives import Life, await_answers, main, one_life, run_lives
from tests.support.broker import wait_until
from tests.support.messages import pairs_of, records, send, send_header
from tests.support.remoting import ConnectionEnded, RemotingClient

TOPIC: Final = "once"
PARTITIONS: Final = 3
SENDERS: Final = 3
IDS: Final = 400
"""Of each sender; between two kills it sends about as many messages."""
AT_ONCE: Final = 16
SPOILED: Final = 0.3
DEADLINE_S: Final = 60.0
WHERE: Final = ("queueId", "queueOffset")
LOG_OFFSET: Final = slice(16, None)
"""The part of a message id that stays when the broker gets another port."""

Place = tuple[str, ...]


class IdLife(Life):
    """One data folder from its beginning to its end."""

    name = "duplicates"
    most_kills = 10

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self._index = folder / "data" / "dedupeindex"
        self._copy = folder / "copy"
        flags = {
            "sweep-interval-ms": 10,
            "checkpoint-interval-ms": self._rng.choice((50, 500, 30_000)),
            "hot-bytes": self._rng.choice((0, 256 << 20)),
            "timer-engine": self._rng.choice(("rocksdict", "sqlite3")),
        }
        self._set(flags)
        self.answers: dict[str, Place] = {}
        self.unknown: list[set[str]] = [set() for _ in range(SENDERS)]
        """The ids of each sender whose messages may be stored or not."""
        self._lock = threading.Lock()
        self._wrong: list[str] = []

    def live(self, kills: int) -> None:
        self._start()
        with RemotingClient(self.broker.host, self.broker.port) as client:
            create(client)
        for _ in range(kills):
            seeds = [self._rng.random() for _ in range(SENDERS)]
            threads = [threading.Thread(target=self._send, args=(n, seeds[n], False)) for n in range(SENDERS)]
            for thread in threads:
                thread.start()
            await_answers(lambda: self.counts["sent"], lambda: bool(self._wrong))
            time.sleep(self._rng.uniform(0, 0.4))
            self._kill()
            for thread in threads:
                thread.join()
            self._spoil()
            self._start()
        for number in range(SENDERS):
            self._send(number, 0.5, True)
        expect(not self._wrong, "\n".join(self._wrong))
        self._check()
        self._stop()

    def _spoil(self) -> None:
        """Delete the index, or put back what it was at an earlier kill: older ones are right, too (I-5)."""
        if self._rng.random() < SPOILED:
            shutil.rmtree(self._index, ignore_errors=True)
            if self._copy.exists() and self._rng.random() < 0.6:
                shutil.copytree(self._copy, self._index)
                self.counts["index: older"] += 1
            else:
                self.counts["index: deleted"] += 1
        elif self._index.exists() and self._rng.random() < 0.5:
            shutil.rmtree(self._copy, ignore_errors=True)
            shutil.copytree(self._index, self._copy)

    def _send(self, number: int, seed: float, is_last: bool) -> None:
        """Send until the broker is gone; the last time, only what had no answer."""
        rng = random.Random(seed)
        unknown = self.unknown[number]
        try:
            with RemotingClient(self.broker.host, self.broker.port) as client:
                while unknown if is_last else True:
                    idents = list(unknown)[:AT_ONCE] or [f"{number}-{rng.randrange(IDS)}" for _ in range(AT_ONCE)]
                    unknown.update(idents)
                    opaques = [(ident, self._put(client, ident, rng)) for ident in idents]
                    for ident, opaque in opaques:
                        answer = client.response(opaque)
                        if answer.code == Response.SUCCESS:
                            self._answered(ident, answer.fields)
                            unknown.discard(ident)
                        elif answer.code != Response.SYSTEM_BUSY:
                            self._wrong.append(f"{ident}: {answer.code} {answer.remark}")
                            return
        except (OSError, ConnectionEnded):
            if is_last:
                raise

    def _put(self, client: RemotingClient, ident: str, rng: random.Random) -> int:
        header = send_header(TOPIC, f"{UNIQUE_KEY}\x01{ident}\x02", partition=rng.randrange(PARTITIONS))
        return send(client, header, b"x" * rng.randrange(200))

    def _answered(self, ident: str, fields: dict[str, str]) -> None:
        place = (*(fields[name] for name in WHERE), fields["msgId"][LOG_OFFSET])
        with self._lock:
            self.counts["sent"] += 1
            before = self.answers.setdefault(ident, place)
            self.counts["duplicates"] += before is not place
            if before != place:
                self._wrong.append(f"{ident} was answered with {before}, then with {place}")

    def _check(self) -> None:
        found: dict[str, Place] = {}
        with RemotingClient(self.broker.host, self.broker.port) as client:
            for partition in range(PARTITIONS):
                for record in records(client, TOPIC, partition):
                    ident = pairs_of(record)[UNIQUE_KEY]
                    expect(ident not in found, f"{ident} is stored twice: {found.get(ident)} and {record.queue_offset}")
                    found[ident] = (str(partition), str(record.queue_offset), f"{record.log_offset:016X}")
        expect(found == self.answers, f"answers and records differ: {set(found.items()) ^ set(self.answers.items())}")
        self.counts["stored"] += len(found)


def create(client: RemotingClient) -> None:
    """Create the topic with its window."""
    fields = {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": str(PARTITIONS), "perm": "6", "order": "false"}
    fields |= {"writeQueueNums": str(PARTITIONS), "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0"}
    fields["attributes"] = "+dedupe.window.ms=3600000"
    wait_until(
        lambda: client.call(Request.UPDATE_AND_CREATE_TOPIC, fields).code == Response.SUCCESS, DEADLINE_S, "the topic is there"
    )


one_case: Final = partial(one_life, IdLife)
run: Final = partial(run_lives, IdLife)

if __name__ == "__main__":
    main(IdLife)
