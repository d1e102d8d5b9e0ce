"""A recorder of the unmodified RocketMQ clients: ``python -m tests.wire.record`` makes ``recordings/*.frames`` anew.

The clients know the broker only by the address of a relay, which stands between them and records what they send.
"""

import contextlib
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import FrameReader
from tests.interop.clients import ClientProcess, go_command, java_command
from tests.interop.mqadmin import AdminTool
from tests.interop.scenarios import Scenarios, create_topic
from tests.support.broker import BrokerProcess
from tests.wire.recordings import Recording, write_recordings

SAME_FRAMES: Final = 4
"""Frames with one code that are kept of one connection: heartbeats, pulls and commits come again and again."""
LONGEST: Final = 3000
"""Bytes of a frame that is kept."""
SAME_LENGTH: Final = {
    7: "10.0.0.9"[:7],
    8: "10.0.0.9",
    9: "10.0.0.10",
    10: "10.0.0.100",
    11: "192.0.2.100",
    12: "203.0.113.10",
    13: "203.0.113.100",
    14: "198.51.100.100",
}
"""An address of each length."""


class Recorder:
    """A relay to ``upstream`` that keeps what each connection sends, under the name of the scenario that is played."""

    def __init__(self) -> None:
        self.upstream = ("", 0)
        self.scenario = "start"
        self.streams: list[tuple[str, bytearray]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                client, _ = self._listener.accept()
                server = socket.create_connection(self.upstream)
                stream = bytearray()
                self.streams.append((self.scenario, stream))
                threading.Thread(target=self._copy, args=(client, server, stream), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, client, bytearray()), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, stream: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                stream += data
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def frames_of(stream: bytes) -> Iterator[bytes]:
    """The whole frames of a stream, as they are, but for most of those that say the same again."""
    seen: Counter[int] = Counter()
    at = 0
    while at + 4 <= len(stream):
        size = 4 + struct.unpack_from(">I", stream, at)[0]
        frame = bytes(stream[at : at + size])
        at += size
        if len(frame) == size:
            (command,) = FrameReader().receive(frame)
            seen[command.code] += 1
            if size <= LONGEST and seen[command.code] <= SAME_FRAMES:
                yield frame


def is_of_client(recording: Recording, language: str) -> bool:
    """Not of the other client, and not of the broker, which tries its own address."""
    commands = FrameReader().receive(b"".join(recording.frames))
    return bool(commands) and all(one.language == language and one.code != Request.IDENTITY for one in commands)


def neutral(frame: bytes, address: str) -> bytes:
    """The frame without this machine's address, as text and in the unique ids of messages."""
    other = SAME_LENGTH[len(address)]
    for form in (str.lower, str.upper):
        here, there = (form(socket.inet_aton(text).hex()).encode() for text in (address, other))
        frame = frame.replace(here, there)
    return frame.replace(address.encode(), other.encode())


def own_address() -> str:
    """The one that clients put into their ids; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def play(client: ClientProcess, admin: ClientProcess, broker: BrokerProcess, recorder: Recorder) -> None:
    """Everything that a client does in its tests, but for what takes a kill or many minutes."""
    scenes = Scenarios()
    plays: list[Callable[[], object]] = [
        lambda: scenes.test_every_way_of_sending(client, broker),
        lambda: scenes.test_topic_is_created_by_the_first_send(client),
        lambda: scenes.test_broadcast(client, broker),
        lambda: scenes.test_tag_filter(client, broker),
        lambda: scenes.test_sql_filter(client, broker),
        lambda: scenes.test_order_of_each_key(client, broker),
        lambda: scenes.test_failures_lead_to_the_dead_letters(client, broker),
        lambda: scenes.test_pulling(client, broker, admin),
        lambda: scenes.test_offsets_are_reset_by_time(client, broker, admin),
        lambda: scenes.test_query_by_key_and_by_id(client, broker, admin),
        lambda: scenes.test_request_and_reply(client, broker),
        lambda: scenes.test_compressed_bodies(client, broker),
    ]
    for scene in plays:
        recorder.scenario = scene.__code__.co_names[-1].removeprefix("test_")
        scene()


def administer(admin: ClientProcess, recorder: Recorder) -> None:
    """Commands of the admin tool that only look."""
    recorder.scenario = "mqadmin"
    tool = AdminTool(admin, recorder.address)
    for command in (
        ["clusterList"],
        ["topicList"],
        ["topicRoute", "-t", "ways"],
        ["topicStatus", "-t", "ways"],
        ["consumerProgress", "-g", "ways-consumers"],
        ["brokerStatus", "-b", recorder.address],
        ["brokerConsumeStats", "-b", recorder.address],
        ["getBrokerConfig", "-b", recorder.address],
    ):
        tool.run(*command)


def record(name: str, language: str, program: tuple[str, ...], java: tuple[str, ...]) -> None:
    """Record one client, which says that it is written in ``language``; Java is asked for what only its admin tool can do."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        home = Path(folder)
        broker = stack.enter_context(BrokerProcess(home / "data", "--advertise", recorder.address))
        recorder.upstream = (broker.host, broker.port)
        client = stack.enter_context(ClientProcess(program, recorder.address, home / "client"))
        admin = client
        if program != java:
            admin = stack.enter_context(ClientProcess(java, broker.registry, home / "admin"))
        create_topic(client, broker, "warm-up")
        play(client, admin, broker, recorder)
        if admin is client:
            administer(admin, recorder)
    address = own_address()
    recordings = [
        Recording(name, scene, [neutral(frame, address) for frame in frames_of(bytes(stream))])
        for scene, stream in recorder.streams
    ]
    kept = [recording for recording in recordings if is_of_client(recording, language)]
    write_recordings(name, kept)
    print(name, len(kept), "connections", sum(len(recording.frames) for recording in kept), "frames")


def main() -> None:
    java = java_command()
    record("rocketmq-java-4.9.8", "JAVA", java, java)
    record("rocketmq-client-go-2", "GO", go_command(), java)


if __name__ == "__main__":
    main()
