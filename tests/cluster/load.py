"""Clients of a group that find its master by themselves, each in a thread, and record their requests and the answers."""

import random
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import orjson

from metaq.client import TextClient
from metaq.client.text.textclient import Batch
from metaq.errors import ClientError, StreamLost
from metaq.message import TopicPartition
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, QueryConsumerOffset, UpdateConsumerOffset, encode_header, with_letters
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from metaq.protocol.text.replies import OK, UNAVAILABLE, Reply
from metaq.protocol.text.writing import write_put
from tests.cluster.history import PARTITIONS, History, Progress
from tests.support.messages import send_header
from tests.support.remoting import ConnectionEnded, RemotingClient, check_open
from tests.support.talk import ReplyReader

ANSWER_S: Final = 5.0
"""Longer than a put waits for replicas; after that the outcome is unknown."""
PAUSE_S: Final = 0.05
"""After each request of a client: the machine has other things to do as well."""
NEXT_S: Final = 0.05
"""Before the next replica is tried."""
END_S: Final = 60.0
IN_DOUBT: Final = ("may be stored", "stored at", "stored, but")
"""What an answer says that is neither yes nor no."""
SHORT: Final = frozenset((Response.FLUSH_DISK_TIMEOUT, Response.SLAVE_NOT_AVAILABLE, Response.FLUSH_SLAVE_TIMEOUT))
LOST: Final = (OSError, ClientError, ConnectionEnded, StreamLost)
"""The connection, and with it what was not answered."""
GROUP: Final = "cg"


def in_doubt(text: str) -> bool:
    """Return whether an answer leaves open if the request was carried out."""
    return any(words in text for words in IN_DOUBT)


class Load:
    """All clients."""

    def __init__(self, ports: Mapping[int, int], history: History, progress: Progress, seed: int) -> None:
        """``ports``: where each replica is reached on loopback."""
        self.ports = dict(ports)
        self.history = history
        self.progress = progress
        self.ended = threading.Event()
        self.transactions = threading.Event()
        """Set: new transactions are begun, too."""
        self.closing = threading.Event()
        """Set: nothing new is begun that comes to its end later."""
        self.failures: list[str] = []
        self._seed = seed
        self.workers: list[Worker] = []

    def start(self, kinds: Sequence[type["Worker"]]) -> None:
        """One client of each kind."""
        self.workers = [kind(self, random.Random(f"{self._seed} {number}")) for number, kind in enumerate(kinds)]
        for worker in self.workers:
            worker.start()

    def stop(self) -> None:
        """Let every client end what it does."""
        self.ended.set()
        for worker in self.workers:
            worker.join(END_S)
        alive = [worker.name for worker in self.workers if worker.is_alive()]
        if alive:
            self.failures.append(f"stuck: {alive} did not end")

    def check(self) -> None:
        """``AssertionError`` when a client has seen what must not be."""
        assert not self.failures, self.failures[0]

    def all_succeeded_since(self, moment: float) -> bool:
        """Return whether every client has had a success since that moment."""
        self.check()
        return all(worker.succeeded_at > moment for worker in self.workers)

    def settled(self) -> bool:
        """Return whether all transactions are decided."""
        self.check()
        return all(worker.settled() for worker in self.workers)

    def ages(self) -> str:
        """How long ago each client had its last success, for reports."""
        now = time.monotonic()
        return ", ".join(f"{one.name} {now - one.succeeded_at:.1f} s ({one.said[:200]})" for one in self.workers)


class Worker(threading.Thread):
    """One client. A subclass says what a step is."""

    pause_s: ClassVar[float] = PAUSE_S

    def __init__(self, load: Load, rng: random.Random) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self.load = load
        self.history = load.history
        self.rng = rng
        self.number = rng.choice(sorted(load.ports))
        self.succeeded_at = time.monotonic()
        self.said = ""
        """What its last step met, as far as it is known."""

    @property
    def port(self) -> int:
        return self.load.ports[self.number]

    def run(self) -> None:
        try:
            while not self.load.ended.is_set():
                try:
                    self.connect()
                    while not self.load.ended.is_set() and self.step():
                        self.succeeded_at = time.monotonic()
                        time.sleep(self.pause_s * self.rng.uniform(0.5, 1.5))
                except LOST as error:
                    self.said = repr(error)
                    self.history.counts["connections lost"] += 1
                finally:
                    self.disconnect()
                self.number = self.number % len(self.load.ports) + 1
                time.sleep(NEXT_S)
        except Exception:  # noqa: BLE001 - told by the thread that runs the test
            self.load.failures.append(f"{self.name}: {traceback.format_exc()}")

    def settled(self) -> bool:
        """Return whether every transaction that this client has begun is decided."""
        return True

    def check(self, host: str, port: int) -> None:
        """Compare what a replica has at the end with what this client was answered. Raises ``Violation``."""

    def counted(self) -> dict[str, int]:
        """Return what happened to this client's messages."""
        return {}

    def connect(self) -> None:
        raise NotImplementedError

    def disconnect(self) -> None:
        raise NotImplementedError

    def step(self) -> bool:
        """One request; false when another replica should be asked."""
        raise NotImplementedError


class TextLink:
    """A connection of the text protocol, on which frames are sent together and answered in their order."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = ReplyReader()

    def check_open(self) -> None:
        """Raise ``ConnectionEnded`` when the broker has closed the connection."""
        check_open(self._socket)

    def ask(self, *frames: bytes, replies: int | None = None) -> Iterator[Reply]:
        """The replies as they come; one to each frame unless another number is given."""
        self._socket.sendall(b"".join(frames))
        missing = len(frames) if replies is None else replies
        while missing:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionEnded("the broker closed the connection")
            for reply in self._reader.receive(data):
                missing -= 1
                yield reply

    def close(self) -> None:
        self._socket.close()


class TextWorker(Worker):
    """One that talks to the master in the text protocol."""

    link: TextLink | None = None

    def connect(self) -> None:
        self.link = TextLink(self.port)

    def disconnect(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None


class RemotingWorker(Worker):
    """One that talks to the master in the remoting protocol."""

    client: RemotingClient | None = None

    def connect(self) -> None:
        self.client = RemotingClient("127.0.0.1", self.port, timeout_s=ANSWER_S)

    def disconnect(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None


class Putter(TextWorker):
    """Puts in the text protocol, several at a time."""

    def connect(self) -> None:
        super().connect()
        self._stream = self.history.new_stream()

    def step(self) -> bool:
        assert self.link is not None
        self.link.check_open()
        partition = self.rng.choice(PARTITIONS)
        numbers, frames = [], []
        for _ in range(self.rng.choice((1, 4, 16))):
            number, body = self.history.send(partition, self._stream)
            numbers.append(number)
            frames.append(write_put(*partition, 0, body, number))
        answered = 0
        stays = True
        try:
            for reply in self.link.ask(*frames):
                assert reply.opaque == numbers[answered], "replies come in the order of the commands"
                stays &= self._answered(reply, partition)
                answered += 1
        finally:
            for number in numbers[answered:]:
                self.history.unknown(number, answered=False)
        return stays

    def _answered(self, reply: Reply, partition: TopicPartition) -> bool:
        text = reply.body.decode()
        if reply.code == OK:
            message_id, number, _ = map(int, text.split())
            assert number == partition.partition
            self.history.stored(reply.opaque, message_id)
        elif in_doubt(text):
            self.history.unknown(reply.opaque, answered=True)
        else:
            assert reply.code == UNAVAILABLE, f"a put is refused for another reason than its replica: {reply}"
            self.history.refused(reply.opaque)
        return reply.code != UNAVAILABLE


class Sender(RemotingWorker):
    """Sends in the remoting protocol, single messages and batches."""

    def connect(self) -> None:
        super().connect()
        self._stream = self.history.new_stream()

    def step(self) -> bool:
        assert self.client is not None
        self.client.check_open()
        partition = self.rng.choice(PARTITIONS)
        size = self.rng.choice((1, 1, 5))
        messages = [self.history.send(partition, self._stream) for _ in range(size)]
        header = send_header(partition.topic, partition=partition.partition)
        code, body = Request.SEND_MESSAGE_V2, messages[0][1]
        if size > 1:
            code, header = Request.SEND_BATCH_MESSAGE, header._replace(batch=True)
            body = encode_batch(BatchItem(0, content, "") for _, content in messages)
        numbers = [number for number, _ in messages]
        try:
            answer = self.client.call(code, with_letters(encode_header(header)), body)
        except LOST:
            for number in numbers:
                self.history.unknown(number, answered=False)
            raise
        for ordinal, number in enumerate(numbers, int(answer.fields.get("queueOffset", 0))):
            if answer.code == Response.SUCCESS:
                self.history.stored(number, ordinal=ordinal)
            elif answer.code in SHORT or in_doubt(answer.remark or ""):
                self.history.unknown(number, answered=True)
            else:
                assert answer.code == Response.SERVICE_NOT_AVAILABLE, answer
                self.history.refused(number)
        return answer.code != Response.SERVICE_NOT_AVAILABLE


class Reader(Worker):
    """Reads all partitions one after the other, from whichever replica, from where it came to, and sometimes from the start."""

    def __init__(self, load: Load, rng: random.Random) -> None:
        super().__init__(load, rng)
        self._positions = dict.fromkeys(PARTITIONS, 0)
        self._client: TextClient | None = None

    def connect(self) -> None:
        self._client = TextClient("127.0.0.1", self.port, timeout_s=ANSWER_S)

    def disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def step(self) -> bool:
        for partition in PARTITIONS:
            again = self.rng.random() < 0.05
            batch = self.get(partition, 0 if again else self._positions[partition])
            for message in batch.messages:
                self.history.delivered(partition, message)
            if batch.messages and not again:
                self._positions[partition] = batch.next_position
        return self.rng.random() < 0.95

    def get(self, partition: TopicPartition, position: int) -> Batch:
        """Return the messages that the replica has from a position on, at most 64 KiB."""
        assert self._client is not None
        return self._client.get(partition.topic, position, partition=partition.partition, max_bytes=64 * 1024)


class Consumer(Reader):
    """Reads one partition in order, counts, and commits to the master what it has read."""

    pause_s = 0.1
    _partition: Final = TopicPartition("orders", 0)
    _place: Final = (GROUP, _partition.topic, Int32(_partition.partition))

    def __init__(self, load: Load, rng: random.Random) -> None:
        super().__init__(load, rng)
        self._position = self._ordinal = self._epoch = 0
        self._remoting: RemotingClient | None = None

    def connect(self) -> None:
        super().connect()
        self._remoting = RemotingClient("127.0.0.1", self.port, timeout_s=ANSWER_S)
        self._goes_on = False

    def disconnect(self) -> None:
        super().disconnect()
        if self._remoting is not None:
            self._remoting.close()
            self._remoting = None

    def step(self) -> bool:
        assert self._remoting is not None
        batch = self.get(self._partition, self._position)
        for message in batch.messages:
            self.history.delivered(self._partition, message)
            self._ordinal, self._position = self._ordinal + 1, message.next_position
        self._goes_on = self._goes_on or self._take_up(self._remoting)
        if not self._goes_on:
            return False
        commit, asked = UpdateConsumerOffset(*self._place, self._ordinal), time.monotonic()
        if self._remoting.call(Request.UPDATE_CONSUMER_OFFSET, encode_header(commit)).code != Response.SUCCESS:
            return False
        self.load.progress.committed(self._ordinal, asked)
        return True

    def _take_up(self, client: RemotingClient) -> bool:
        """Compare what a master knows with what was committed; false when this is none, or an old one."""
        answer = client.call(Request.REPLICA_STATUS)
        status: dict[str, Any] = orjson.loads(answer.body) if answer.code == Response.SUCCESS else {"role": ""}
        if status["role"] != "master" or status["epoch"] < max(self._epoch, self.history.epoch):
            return False
        answer = client.call(Request.QUERY_CONSUMER_OFFSET, encode_header(QueryConsumerOffset(*self._place)))
        if answer.code not in {Response.SUCCESS, Response.QUERY_NOT_FOUND}:
            return False
        self._epoch = status["epoch"]
        self.load.progress.found(int(answer.fields.get("offset", 0)))
        return True
