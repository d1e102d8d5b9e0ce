"""The unmodified RocketMQ clients in processes of their own, each driven step by step (see Driver.java and main.go)."""

from __future__ import annotations

import base64
import fcntl
import functools
import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

JAVA: Final = Path(__file__).parent / "rocketmq_java"
GO: Final = Path(__file__).parent / "rocketmq_go"
BUILD_SECONDS: Final = 600
LIFETIME_SECONDS: Final = 600
"""A driver ends itself after that, whatever happens to the test."""
STEP_SECONDS: Final = 120
JVM_FLAGS: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-Drocketmq.client.logUseSlf4j=true")
"""Short-lived processes beside a broker on a small machine: start fast, take one thread for collections."""


@contextmanager
def one_build_at_a_time() -> Iterator[None]:
    """Keep other test processes out: they may want the same build, and the same downloads."""
    everybody = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(everybody, fcntl.LOCK_EX)
        yield
    finally:
        os.close(everybody)


def run_build(command: Sequence[str], folder: Path) -> None:
    """Build in a folder. ``RuntimeError`` has what a build that failed has printed."""
    with one_build_at_a_time():
        _run(command, folder)


def run_maven(project: Path, *goals: str) -> None:
    """Run goals of Maven, unless that was done with the project as it is: a start of Maven takes seconds of a processor.

    Each test process asks, and what was built is kept in ``.build`` from run to run.
    """
    digest = hashlib.sha256(repr(goals).encode())
    for path in sorted([project / "pom.xml", *(project / "src").rglob("*.*")]):
        digest.update(f"{path.relative_to(project)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    done = project / ".build" / f"done-{digest.hexdigest()[:16]}"
    with one_build_at_a_time():
        if not done.exists():
            _run(["mvn", "-q", "-B", *goals], project)
            done.touch()


def _run(command: Sequence[str], folder: Path) -> None:
    environment = os.environ | {"CGO_ENABLED": "0"}  # a Go program that needs no C compiler
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed in {folder}:\n{done.stdout}{done.stderr}")


@functools.cache
def java_class_path() -> str:
    """Compile the Java driver and fetch the client's jars; return them as a class path."""
    run_maven(JAVA, "compile", "dependency:copy-dependencies")
    return f"{JAVA / '.build' / 'classes'}:{JAVA / '.build' / 'dependency'}/*"


def java_flags() -> tuple[str, ...]:
    """Return the arguments with which a Java program of the build is started, up to its main class."""
    # The admin tool reads conf/logback_tools.xml there.
    return (*JVM_FLAGS, f"-Drocketmq.home.dir={JAVA / '.build' / 'classes'}", "-cp", java_class_path())


def java_command() -> tuple[str, ...]:
    """The program and first arguments of a Java driver, built."""
    return ("java", *java_flags(), "metaq.interop.Driver")


def go_command(name: str = "driver", flags: Sequence[str] = ()) -> tuple[str, ...]:
    """The program of a Go driver, built; modules and objects stay in Go's own caches."""
    run_build(["go", "build", "-buildvcs=false", *flags, "-o", f".build/{name}", "."], GO)
    return (str(GO / ".build" / name),)


class Outgoing(NamedTuple):
    """A message that a producer sends. Messages with one ``ordering_key`` go to one queue; ``delay`` is a level, 0 for none."""

    topic: str
    body: bytes
    tag: str | None = None
    keys: Sequence[str] = ()
    properties: dict[str, str] | None = None
    delay: int = 0
    ordering_key: str | None = None

    def view(self) -> dict[str, Any]:
        """Return the message as the drivers read it: what is not set is left out."""
        fields = self._asdict() | {"body": base64.b64encode(self.body).decode("ascii"), "keys": list(self.keys)}
        return {name: value for name, value in fields.items() if value}


class Sent(NamedTuple):
    """The client's own result of a send; ``offset_id`` is the broker's name for the place of the message."""

    status: str
    id: str
    offset_id: str
    queue: int
    offset: int


class Received(NamedTuple):
    """A message as the client decoded it. Times in ms; ``at`` is when the listener got it, 0 without a listener."""

    topic: str
    body: bytes
    id: str
    offset_id: str
    tag: str | None
    properties: dict[str, str]
    queue: int
    offset: int
    reconsumed: int
    born: int
    stored: int
    size: int
    consumer: str = ""
    at: int = 0

    @classmethod
    def read(cls, view: dict[str, Any]) -> Self:
        """From a driver's JSON, of which it takes what it knows."""
        fields = {name: view[name] for name in cls._fields if name in view}
        return cls(**fields | {"body": base64.b64decode(view["body"])})


class ClientError(Exception):
    """The client raised. ``code``: the broker's, where the client tells it; ``chain``: all causes."""

    def __init__(self, chain: list[dict[str, Any]]) -> None:
        super().__init__(" <- ".join(f"{cause['class']}: {cause['message']}" for cause in chain))
        self.chain = chain
        self.code: int | None = next((cause["code"] for cause in chain if cause["code"] is not None), None)


class ClientProcess:
    """A driver that talks to ``registry``, with ``home`` for what its client keeps locally.

    Every step returns, or raises :class:`ClientError`, or after ``STEP_SECONDS`` :class:`TimeoutError`. Messages and
    acknowledgements of streams arrive in the background, in the order in which the driver met them.
    """

    def __init__(self, command: Sequence[str], registry: str, home: Path) -> None:
        home.mkdir(parents=True)
        self._log = home / "stderr.log"
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._received: list[Received] = []
        self._ended = False
        self._steps = 0
        program = [*command, registry, str(LIFETIME_SECONDS)]
        if command[0] == "java":
            program.insert(1, f"-Duser.home={home}")
        environment = os.environ | {"HOME": str(home), "ROCKETMQ_GO_LOG_LEVEL": "warn"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, encoding="utf-8"
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL: the connections end without a word to the broker."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def pause(self) -> None:
        """SIGSTOP: its connections stay open, and it takes nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """Return what the process has written to standard error."""
        return self._log.read_text("utf-8", errors="replace")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            view = json.loads(line)
            with self._changed:
                match view.get("event"):
                    case None:
                        self._answers[view["id"]] = view
                    case "message":
                        self._received.append(Received.read(view))
                    case _:
                        self._events.append(view)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = STEP_SECONDS) -> None:
        """Return as soon as ``condition``, asked after each line of the driver, holds; ``TimeoutError`` after that."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._ended, seconds)
            if not condition():
                trouble = "the driver ended" if self._ended else f"not within {seconds} s"
                raise TimeoutError(f"{trouble}: {what}; other events: {self._events[-3:]}; its log:\n{self.log()[-4000:]}")

    def messages(self, consumer: str) -> list[Received]:
        """Return the messages that the listener of that push consumer has received so far."""
        with self._changed:
            return [message for message in self._received if message.consumer == consumer]

    def bodies(self, consumer: str) -> list[bytes]:
        """The bodies of :meth:`messages`."""
        return [message.body for message in self.messages(consumer)]

    def wait_for_bodies(self, consumer: str, expected: Iterable[bytes], seconds: float = STEP_SECONDS) -> list[Received]:
        """Wait until the push consumer has been given each of these bodies at least once; all that it has been given."""
        wanted = set(expected)

        def missing() -> set[bytes]:
            return wanted.difference(self.bodies(consumer))

        self.wait(lambda: not missing(), f"{len(wanted)} messages for {consumer}", seconds)
        return self.messages(consumer)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of that kind that the driver has reported so far."""
        with self._changed:
            return [event for event in self._events if event["event"] == kind]

    def acknowledged(self, topic: str) -> list[str]:
        """The texts of a stream that the broker has acknowledged up to now."""
        return [event["text"] for event in self.events("acknowledged") if event["topic"] == topic]

    def call(self, step: str, **arguments: object) -> Any:
        """Let the driver do one step, with the arguments that Driver.java and main.go read."""
        assert self._process.stdin is not None
        self._steps += 1
        step_id = self._steps
        self._process.stdin.write(json.dumps({"id": step_id, "step": step, **arguments}) + "\n")
        self._process.stdin.flush()
        self.wait(lambda: step_id in self._answers, f"the answer to {step} {arguments}")
        answer = self._answers.pop(step_id)
        if "raised" in answer:
            raise ClientError(answer["raised"])
        return answer["returned"]

    def start_producer(self, producer: str, group: str, **options: object) -> None:
        """``options`` of the Java driver: hurry_ms, how often it asks the registry and greets brokers; usually 30 s; traced, to
        write into the topic of traces; ``user`` and ``secret``, of the Go driver too."""
        self.call("start_producer", producer=producer, group=group, **options)

    def send(self, producer: str, message: Outgoing, way: str = "sync") -> Sent:
        """Send and wait for the result; ``way`` is sync or async."""
        return Sent(**self.call("send", producer=producer, way=way, message=message.view()))

    def send_oneway(self, producer: str, message: Outgoing) -> None:
        self.call("send", producer=producer, way="oneway", message=message.view())

    def send_batch(self, producer: str, messages: Sequence[Outgoing]) -> Sent:
        """Send all as one; the result carries the ids of all, with commas between."""
        return Sent(**self.call("send_batch", producer=producer, messages=[message.view() for message in messages]))

    def start_consumer(self, consumer: str, group: str, topic: str, expression: str = "*", **options: object) -> None:
        """A push consumer from the first offset on. ``options``: sql, broadcast, orderly, failing, replier,
        max_reconsume_times, and as above hurry_ms and traced; a failing listener fails each message, to be given it again after
        delay level 1."""
        self.call("start_consumer", consumer=consumer, group=group, topic=topic, expression=expression, **options)

    def pull(self, group: str, topic: str, expression: str = "*") -> list[Received]:
        """The whole topic with the pull consumer, queue by queue."""
        return [Received.read(view) for view in self.call("pull", group=group, topic=topic, expression=expression)]

    def poll(self, group: str, topic: str, count: int, seconds: int, expression: str = "*") -> list[Received]:
        """The group's next messages with the polling consumer: ``count``, or fewer after ``seconds``."""
        views = self.call("poll", group=group, topic=topic, expression=expression, count=count, seconds=seconds)
        return [Received.read(view) for view in views]
