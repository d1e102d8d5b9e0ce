"""The unmodified Java MetaQ client in a process of its own, called step by step (see Driver.java)."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.interop.clients import run_maven

PROJECT = Path(__file__).parent
BUILD = PROJECT / ".build"
LIFETIME_SECONDS = 180
GROUP = "readers"


def build() -> str:
    """Compile the driver, fetch the client's jars, and return the class path."""
    run_maven(PROJECT, "compile", "dependency:copy-dependencies")
    return f"{BUILD / 'classes'}:{BUILD / 'dependency'}/*"


@dataclass(frozen=True)
class Outgoing:
    """A message that a producer sends. An empty attribute is not the same as none."""

    topic: str
    payload: bytes
    attribute: str | None = None


@dataclass(frozen=True)
class Sent:
    """The client's SendResult, and the id that it gave to the message."""

    success: bool
    id: int
    partition: int | None
    offset: int
    error: str | None


@dataclass(frozen=True)
class Received:
    """A message as the client decoded it."""

    id: int
    attribute: str | None
    payload: bytes


@dataclass(frozen=True)
class Fetched:
    """The whole messages of one answer, and how many bytes of the partition they took."""

    messages: list[Received]
    bytes: int


class JavaError(Exception):
    """The client raised. ``chain``: (class, message) of the exception and its causes; ``code``: an XAException's."""

    def __init__(self, chain: list[tuple[str, str]], code: int | None) -> None:
        super().__init__(" <- ".join(f"{name}: {message}" for name, message in chain))
        self.chain = chain
        self.code = code


class JavaProcess:
    """A driver of the Java client, with ``home`` for what it keeps locally.

    Every call either returns or raises :class:`JavaError`. The process ends itself after ``LIFETIME_SECONDS``, so no
    call lasts longer.
    """

    def __init__(self, class_path: str, home: Path, main: str, *arguments: str) -> None:
        home.mkdir()
        self._log_path = home / "stderr.log"
        self._log = self._log_path.open("wb")
        self._process = subprocess.Popen(
            ["java", f"-Duser.home={home}", "-cp", class_path, f"metaq.interop.{main}", *arguments, str(LIFETIME_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(LIFETIME_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def _call(self, step: str, **arguments: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"step": step, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            log = self._log_path.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the Java client ended in step {step} with status {self._process.wait()}:\n{log}")
        answer = json.loads(line)
        if "raised" in answer:
            raise JavaError([(cause["class"], cause["message"]) for cause in answer["raised"]], answer.get("code"))
        return answer["returned"]


class JavaClient(JavaProcess):
    """One session factory of the Java client in direct mode."""

    def __init__(self, class_path: str, host: str, port: int, home: Path) -> None:
        super().__init__(class_path, home, "Driver", f"meta://{host}:{port}", str(home))

    def put(self, message: Outgoing) -> Sent:
        """Publish the topic and send one message."""
        return Sent(**self._call("put", **_message(message)))

    def put_pipelined(self, messages: Sequence[Outgoing]) -> list[Sent]:
        """Send all with a callback each before any answer is awaited."""
        results = self._call("put_pipelined", messages=[_message(message) for message in messages])
        return [Sent(**result) for result in results]

    def get(self, topic: str, offset: int, max_size: int, *, partition: int = 0) -> Fetched | None:
        """Read from a text position; None where the client says that there is nothing."""
        fetched = self._call("get", topic=topic, group=GROUP, partition=partition, offset=offset, max_size=max_size)
        return fetched and Fetched([_received(message) for message in fetched["messages"]], fetched["bytes"])

    def read_all(self, topic: str, max_size: int) -> list[Received]:
        """Read partition 0 from its start to its end, by the bytes that each answer's messages took."""
        messages: list[Received] = []
        offset = 0
        while fetched := self.get(topic, offset, max_size):
            assert fetched.messages, f"no whole message at {offset} of {topic} with max_size {max_size}"
            messages += fetched.messages
            offset += fetched.bytes
        return messages

    def offset(self, topic: str, offset: int) -> int:
        """Ask for the valid offset next to ``offset`` in partition 0."""
        answer: int = self._call("offset", topic=topic, group=GROUP, partition=0, offset=offset)
        return answer

    def subscribe(self, topic: str, offset: int, max_size: int) -> None:
        """Start a listener on partition 0, at the end if ``offset`` is the largest int64."""
        self._call("subscribe", topic=topic, group=GROUP, offset=offset, max_size=max_size)

    def take(self, topic: str) -> Received | None:
        """Return the listener's next message; None if none comes within 20 s."""
        message = self._call("take", topic=topic)
        return message and _received(message)

    def stats(self, item: str | None = None) -> dict[str, str]:
        """Return the broker's statistics as the client parsed them."""
        values: dict[str, str] = self._call("stats", item=item)
        return values

    def step(self, name: str) -> object:
        """Run a step without arguments: await_connected, commit, rollback."""
        result: object = self._call(name)
        return result

    # -- transactions -------------------------------------------------------------------------------------------------

    def publish(self, topic: str, partitions: int) -> None:
        """Tell the producers of transactions of a topic, as ZooKeeper would."""
        self._call("publish", topic=topic, partitions=partitions)

    def begin(self, timeout_s: int = 0) -> None:
        """Begin a local transaction; the broker is told with the first message."""
        self._call("begin", timeout_s=timeout_s)

    def put_in_transaction(self, message: Outgoing) -> Sent:
        """Send one message in the local transaction."""
        return Sent(**self._call("put_in_transaction", **_message(message)))

    def put_in_branch(self, message: Outgoing) -> Sent:
        """Send one message in the XA branch that has been started."""
        return Sent(**self._call("xa_put", **_message(message)))

    def xa(self, step: str, number: int = 1) -> Any:
        """Call the XA resource: start, end, prepare, commit, commit_one_phase, rollback, forget, recover, commit_recovered,
        is_same, or timeout, whose number are seconds; of the others it is the branch's."""
        return self._call(f"xa_{step}", number=number)


@dataclass(frozen=True)
class Placed:
    """The client's result of a put through ZooKeeper."""

    success: bool
    broker: int | None
    partition: int | None
    error: str | None


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Confine what this thread starts to one processor.

    Whenever brokers change, the client closes its connection to each and opens another at once. On several processors one
    thread sometimes removes the old one just while another counts them: the client takes the new one for one too many, closes
    it, and has none until brokers change again.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(before))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class JavaMember(JavaProcess):
    """One session factory of the Java client that finds its brokers through ZooKeeper, a producer, and consumers."""

    def __init__(self, class_path: str, zookeeper: str, session_ms: int, home: Path) -> None:
        with on_one_processor():
            super().__init__(class_path, home, "ClusterDriver", zookeeper, str(session_ms))

    def put(self, message: Outgoing) -> Placed:
        """Publish the topic and send one message."""
        return Placed(**self._call("put", **_message(message)))

    def subscribe(self, topic: str, group: str) -> None:
        """Be a member of the group, which shares the topic's partitions."""
        self._call("subscribe", topic=topic, group=group)

    def drain(self) -> list[bytes]:
        """The messages that have come since this was called last."""
        return [base64.b64decode(payload) for payload in self._call("drain")]

    def pause(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()


def _message(message: Outgoing) -> dict[str, str | None]:
    payload = base64.b64encode(message.payload).decode("ascii")
    return {"topic": message.topic, "payload": payload, "attribute": message.attribute}


def _received(view: dict[str, Any]) -> Received:
    return Received(view["id"], view["attribute"], base64.b64decode(view["payload"]))
