"""Consumers of every kind, one after another in a group, while much goes wrong; and what they must have received.

A case is a topic and a group of their own on a broker that serves many cases. Messages are sent, some of them unreadable. Then
the group lives several times, each time as a consumer of another kind: it iterates, commits by itself, listens, listens in
order, pulls, two of them share, the same in asyncio with calls that are cancelled, or in a child that is forked beside it and
killed. Meanwhile listeners fail, offsets are reset to the beginning, more is sent, consumers are closed in the middle, and in
some cases the broker is killed and started again. Or the consumers of a case are broadcast ones, with their offsets in a file.

What must hold: at the end of each life no offset is committed whose message was not delivered since the last reset, nor is
among the dead letters; after a last life each message has been.

``python -m tests.crash.consumers --seed 7 --cases 100`` runs it. A failure names the seed; a seed draws the same case again,
but not the same instants.
"""

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from metaq.client import Client, ConsumeFrom, Model, ReceivedMessage, SimpleConsumer, connect
from metaq.client.consuming.offsets import LocalOffsets
from metaq.errors import ClientError
from metaq.message import MessageQueue
from tests.client.poison import POISON, send_packed
from tests.crash import asyncconsumers
from tests.crash.command import Result, expect, main
from tests.crash.driver import CaseFailed
from tests.support.broker import BrokerProcess

DEADLINE_S: Final = 60.0
QUIET_S: Final = 0.3
"""A life ends when nothing came for so long."""
POISONS: Final = sorted(POISON.items(), key=lambda item: len(item[0]))[:-1]
"""All but the one that is large only when it is inflated: that one costs time."""
KILLS: Final = 0.06
"""Share of the cases whose broker is killed."""
Life = Callable[["Case", Client], None]


class Broker:
    """A broker that cases use one after the other."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="metaq-consumers-"))
        self.process = BrokerProcess(self.folder / "data")
        self.process.start()

    def close(self) -> None:
        self.process.kill()
        shutil.rmtree(self.folder)


class Case:
    """One topic, one group, several lives."""

    def __init__(self, broker: Broker, seed: int) -> None:
        self.rng = random.Random(seed)
        self.topic, self.group = f"topic-{os.getpid()}-{seed}", f"group-{os.getpid()}-{seed}"
        self.counts: Counter[str] = Counter()
        self.broker = broker.process
        self._offsets_folder = broker.folder / "offsets" / self.group
        self._kills = self.rng.random() < KILLS
        self.model = Model.BROADCASTING if self.rng.random() < 0.15 else Model.CLUSTERING
        self._resets = self.model is Model.CLUSTERING and not self._kills
        self.listens = False
        """Whether there may be dead letters."""
        self._guard = threading.Lock()  # guards what follows
        self._sent: dict[str, tuple[MessageQueue, int]] = {}
        self._delivered: set[str] = set()

    def connect(self) -> Client:
        """A client of the group."""
        return connect(self.broker.registry, timeout_s=DEADLINE_S, instance=self.group)

    # -- what is sent and what arrives --------------------------------------------------------------------------------

    def send(self, client: Client, count: int) -> None:
        """Send so many messages, some of which cannot be read."""
        producer = client.producer()
        while count > 0:
            if self.rng.random() < 0.2:
                results = [send_packed(client, self.topic, *self.rng.choice(POISONS))]
                self.counts["poison"] += 1
            else:
                results = producer.send_batch(self.topic, [b"body"] * self.rng.randint(1, 4))
            with self._guard:
                self._sent |= {result.id: (result.queue, int(result.queue_offset)) for result in results}
            count -= len(results)

    def got(self, message: ReceivedMessage) -> None:
        """A message has reached the program; what cannot be read says so."""
        expect((message.body == b"body") == (message.error is None), "a message is as it was sent, or says why not", message)
        self.delivered(message.id)

    def delivered(self, *ids: str) -> None:
        with self._guard:
            self._delivered.update(ids)

    def listener(self, message: ReceivedMessage) -> None:
        """Fails now and then, by an error that ends threads, too."""
        expect(message.error is None, "a listener sees only what can be read", message)
        if (chance := self.rng.random()) < 0.1:
            raise SystemExit if chance < 0.02 else ValueError
        self.got(message)

    @property
    def missing(self) -> set[str]:
        with self._guard:
            return self._sent.keys() - self._delivered

    def consumer(self, client: Client, *, auto_commit: bool = False) -> SimpleConsumer:
        return client.consumer(
            self.topic,
            self.group,
            model=self.model,
            consume_from=ConsumeFrom.FIRST,
            offsets_folder=self._offsets_folder,
            auto_commit=auto_commit,
        )

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def trouble(self, client: Client, *, resets: bool = True) -> None:
        """Something may happen now. A case with a kill has no resets: the newest offsets may go back to before one."""
        chance = self.rng.random()
        if chance < 0.02:
            self.send(client, 3)
        elif self._kills and chance < 0.3:
            self._kills = False
            self.counts["broker kills"] += 1
            self.broker.restart(same_port=True)
        elif resets and self._resets and chance < 0.03:
            self.counts["resets"] += 1
            with self._guard:
                self._delivered.clear()
            client.admin().reset_offset(self.group, self.topic, ConsumeFrom.FIRST, apply=True)

    # -- the case -----------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """From the first message to the last."""
        lives = list(LIVES if self.model is Model.CLUSTERING else BROADCAST_LIVES)
        with self.connect() as client:
            client.admin().create_topic(self.topic, self.rng.randint(1, 3))
            self.send(client, self.rng.randint(5, 30))
        for _ in range(self.rng.randint(1, 3)):
            life = self.rng.choice(lives)
            self.counts[life.__name__.strip("_")] += 1
            with self.connect() as client:
                life(self, client)
            self._check()
        self._drain()

    def _check(self) -> None:
        """No commit is ahead of delivery."""
        with connect(self.broker.registry, timeout_s=DEADLINE_S) as client:
            if self.listens:
                self.delivered(*(letter.id for letter in client.admin().dead_letters(self.group)))
            committed = self._committed(client)
        missing = self.missing
        with self._guard:
            ahead = [place for ident, place in self._sent.items() if ident in missing and place[1] < committed.get(place[0], 0)]
        expect(not ahead, "no commit is ahead of delivery", (ahead, committed))

    def _committed(self, client: Client) -> dict[MessageQueue, int]:
        if self.model is Model.CLUSTERING:
            reader = client.pull_consumer(self.topic, self.group)
            return {queue: reader.committed(queue) or 0 for queue in reader.partitions()}
        offsets = LocalOffsets(self._offsets_folder / self.group / f"{self.group}.json")
        offsets.open()
        try:
            queues = {queue for queue, _ in self._sent.values()}
            return {queue: offsets.known(queue) or 0 for queue in queues}
        finally:
            offsets.close()

    def _drain(self) -> None:
        """A last life, in which nothing goes wrong, gets the rest."""
        with self.connect() as client, self.consumer(client) as consumer:
            deadline = time.monotonic() + DEADLINE_S
            while self.missing and time.monotonic() < deadline:
                message = consumer.receive(timeout_s=1.0)
                if message is not None:
                    self.got(message)
            expect(not self.missing, "every message is delivered or a dead letter", [self._sent[one] for one in self.missing])
        with self._guard:
            self.counts["messages"] += len(self._sent)


# -- lives ------------------------------------------------------------------------------------------------------------


def _iterates(case: Case, client: Client) -> None:
    with case.consumer(client) as consumer:
        for _ in range(case.rng.randint(1, 40)):
            message = consumer.receive(timeout_s=QUIET_S)
            if message is None:
                break
            case.got(message)
            case.trouble(client)
            if case.rng.random() < 0.3:
                with suppress(ClientError):
                    consumer.commit()


def _share(case: Case, client: Client) -> None:
    """Two members at a time, which come and go."""

    def member() -> None:
        with connect(case.broker.registry, timeout_s=DEADLINE_S) as own, suppress(ClientError):  # the broker may just be killed
            _iterates(case, own)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(member) for _ in range(3)]:
            done.result()


def _commits_by_itself(case: Case, client: Client) -> None:
    with case.consumer(client, auto_commit=True) as consumer:
        for _ in range(case.rng.randint(1, 40)):
            message = consumer.receive(timeout_s=QUIET_S)
            if message is None:
                break
            case.got(message)
            case.trouble(client)


def _listens(case: Case, client: Client, *, ordered: bool = False) -> None:
    case.listens = True
    consumer = client.listen(
        case.topic,
        case.group,
        case.listener,
        consume_from=ConsumeFrom.FIRST,
        ordered=ordered,
        threads=case.rng.choice([1, 4]),
        max_reconsume_times=0,
    )
    with consumer:
        end = time.monotonic() + case.rng.choice([0.0, 0.02, 0.1, 0.3])
        while time.monotonic() < end:
            case.trouble(client)
            time.sleep(0.01)


def _listens_in_order(case: Case, client: Client) -> None:
    _listens(case, client, ordered=True)


def _pulls(case: Case, client: Client) -> None:
    with client.pull_consumer(case.topic, case.group) as reader:
        reader.assign(reader.partitions())
        for _ in range(case.rng.randint(1, 10)):
            messages = reader.poll(QUIET_S, case.rng.choice([1, 5, 1000]))
            for message in messages:
                case.got(message)
            case.trouble(client, resets=False)
            if case.rng.random() < 0.5:
                with suppress(ClientError):
                    reader.commit()
            if not messages:
                break


def _is_forked(case: Case, client: Client) -> None:
    """The program consumes, and a child of it does so with a client of its own, until it is killed or closes."""
    ends_in_order = case.rng.random() < 0.5
    seen, tell = os.pipe()
    with case.consumer(client) as consumer:
        message = consumer.receive(timeout_s=QUIET_S)
        if message is not None:
            case.got(message)
        child = os.fork()
        if child == 0:
            _child(case, tell, ends_in_order=ends_in_order)
        os.close(tell)
        for _ in range(case.rng.randint(1, 10)):
            message = consumer.receive(timeout_s=QUIET_S)
            if message is None:
                break
            case.got(message)
        consumer.commit()
    try:
        with os.fdopen(seen) as lines:
            case.delivered(*(line.strip() for line in lines))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _child(case: Case, tell: int, *, ends_in_order: bool) -> None:
    """Tell what has arrived before it is committed."""
    signal.alarm(round(DEADLINE_S))
    try:
        with connect(case.broker.registry, timeout_s=DEADLINE_S) as client, case.consumer(client) as consumer:
            for _ in range(case.rng.randint(1, 10)):
                message = consumer.receive(timeout_s=QUIET_S)
                if message is None:
                    break
                os.write(tell, f"{message.id}\n".encode())
                if case.rng.random() < 0.5:
                    consumer.commit()
            if not ends_in_order:
                os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(0)


BROADCAST_LIVES: Final[list[Life]] = [_iterates, _commits_by_itself]
LIVES: Final[list[Life]] = [
    *BROADCAST_LIVES,
    _share,
    _listens,
    _listens_in_order,
    _pulls,
    _is_forked,
    asyncconsumers.iterates,
    asyncconsumers.pulls,
    asyncconsumers.listens,
]


# -- runs -------------------------------------------------------------------------------------------------------------


def one_case(seed: int, broker: Broker) -> dict[str, int]:
    """Run a case; what it did."""
    case = Case(broker, seed)
    try:
        case.live()
    except BaseException as error:
        told = f"{error!r}\ntopic {case.topic}, {dict(case.counts)}\nfolder: {broker.folder}"
        raise CaseFailed(f"{told}\nreplay: python -m tests.crash.consumers --seed {seed}") from error
    return {"cases": 1, **case.counts}


def run(seed: int, count: int) -> Result:
    """So many cases on one broker."""
    details: Counter[str] = Counter()
    broker = Broker()
    try:
        for number in range(seed, seed + count):
            details.update(one_case(number, broker))
    finally:
        broker.process.kill()
    shutil.rmtree(broker.folder)
    cases = details.pop("cases")
    return Result("consumers", range(seed, seed + count), cases, dict(details))


if __name__ == "__main__":
    main(lambda seed: {"cases": 1, **run(seed, 1).details})
