"""Each toxic of the proxy, between real sockets."""

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.support.broker import wait_until
from tests.support.proxy import Direction, Proxy

DEADLINE_S: Final = 60.0
LONG_S: Final = 3600.0
"""A delay that ends only by healing."""


class Link:
    """A target, a proxy before it, and connections through the proxy as pairs of a client's and a target's socket."""

    def __init__(self, seed: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(DEADLINE_S)
        self.proxy = Proxy("127.0.0.1", self.listener.getsockname()[1], seed=seed)
        self.sockets: list[socket.socket] = [self.listener]

    def close(self) -> None:
        self.proxy.close()
        for own in self.sockets:
            own.close()

    def dial(self, timeout_s: float = DEADLINE_S) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.proxy.port), timeout_s)
        client.settimeout(DEADLINE_S)
        self.sockets.append(client)
        return client

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = self.dial()
        served, _ = self.listener.accept()
        served.settimeout(DEADLINE_S)
        self.sockets.append(served)
        return client, served


@contextlib.contextmanager
def linked(seed: int = 0) -> Iterator[Link]:
    made = Link(seed)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def link() -> Iterator[Link]:
    with linked() as made:
        yield made


def ends(link: Link, direction: Direction) -> tuple[socket.socket, socket.socket]:
    """Sender and receiver of a new connection in ``direction``."""
    client, served = link.connect()
    return (client, served) if direction == "up" else (served, client)


def receive(receiver: socket.socket, count: int) -> bytes:
    """``count`` bytes, or what came before the end of the stream."""
    data = bytearray()
    while len(data) < count and (part := receiver.recv(count - len(data))):
        data += part
    return bytes(data)


def nothing_came(receiver: socket.socket) -> bool:
    """Neither bytes nor an end."""
    readable, _, _ = select.select([receiver], [], [], 0)
    return not readable


def assert_echo(client: socket.socket, served: socket.socket) -> None:
    client.sendall(b"ask")
    assert receive(served, 3) == b"ask"
    served.sendall(b"answer")
    assert receive(client, 6) == b"answer"


def assert_reset(end: socket.socket) -> None:
    with pytest.raises(ConnectionResetError):
        end.recv(1)


def reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def test_bytes_pass_both_ways_and_each_end_for_itself(link: Link) -> None:
    """F-PART: without toxics."""
    client, served = link.connect()
    other_client, other_served = link.connect()
    assert_echo(client, served)
    assert_echo(other_client, other_served)
    client.shutdown(socket.SHUT_WR)
    assert served.recv(1) == b""
    served.sendall(b"still")
    assert receive(client, 5) == b"still"
    served.close()
    assert client.recv(1) == b""
    assert_echo(other_client, other_served)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_many_bytes_arrive_as_they_were_sent(link: Link, direction: Direction) -> None:
    """F-PART: more than the proxy holds at once, to a receiver that takes them as they come."""
    sender, receiver = ends(link, direction)
    sent = random.Random(1).randbytes(24 * 1024 * 1024)
    sending = threading.Thread(target=sender.sendall, args=(sent,))
    sending.start()
    assert receive(receiver, len(sent)) == sent
    sending.join()


def test_a_reset_of_one_side_reaches_the_other(link: Link) -> None:
    """F-PART: also the refusal of a target that does not listen, and behind an end in good order."""
    client, served = link.connect()
    reset(served)
    assert_reset(client)
    client, served = link.connect()
    reset(client)
    assert_reset(served)
    client, served = link.connect()
    client.shutdown(socket.SHUT_WR)
    assert served.recv(1) == b""
    reset(client)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):  # its system is told by what it sends
        wait_until(lambda: served.send(b"x") == 0, DEADLINE_S, "the target is told of the reset")
    link.listener.close()
    with pytest.raises(ConnectionResetError):  # which may come while it still connects
        link.dial().recv(1)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_delay_holds_each_byte_for_its_time(link: Link, direction: Direction) -> None:
    """F-PART."""
    link.proxy.delay(direction, 0.05, 0.02)
    sender, receiver = ends(link, direction)
    for _ in range(5):
        start = time.monotonic()
        sender.sendall(b"x")
        assert receive(receiver, 1) == b"x"
        assert time.monotonic() - start >= 0.05
    link.proxy.delay(direction, LONG_S)
    sender.sendall(b"late")
    receiver.sendall(b"!")
    assert receive(sender, 1) == b"!"
    assert nothing_came(receiver)
    link.proxy.heal()
    assert receive(receiver, 4) == b"late"


def test_jitter_keeps_the_order(link: Link) -> None:
    """F-PART."""
    link.proxy.delay("up", 0.0, 0.01)
    client, served = link.connect()
    sent = bytes(range(200))
    for byte in sent:
        client.sendall(bytes([byte]))
    assert receive(served, len(sent)) == sent


def slices(direction: Direction, seed: int, sent: bytes, max_bytes: int) -> int:
    """In how many slices ``sent`` goes."""
    with linked(seed) as link:
        sender, receiver = ends(link, direction)
        link.proxy.slice(direction, max_bytes)
        sender.sendall(sent)
        assert receive(receiver, len(sent)) == sent
        return link.proxy.sends(direction)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_slices_are_small_random_and_seeded(direction: Direction) -> None:
    """F-PART."""
    sent = random.Random(2).randbytes(3000)
    counts = [slices(direction, seed, sent, 20) for seed in (1, 2, 3)]
    assert counts == [slices(direction, seed, sent, 20) for seed in (1, 2, 3)]
    assert len(set(counts)) > 1
    assert all(3000 // 20 < count < 3000 // 5 for count in counts)
    assert slices(direction, 1, b"each", 1) == 4


@pytest.mark.parametrize("direction", ["up", "down"])
def test_bandwidth_is_a_limit_until_healed(link: Link, direction: Direction) -> None:
    """F-PART."""
    sender, receiver = ends(link, direction)
    link.proxy.bandwidth(direction, 100_000)
    start = time.monotonic()
    sender.sendall(bytes(30_000))
    assert len(receive(receiver, 30_000)) == 30_000
    assert time.monotonic() - start >= 0.28
    link.proxy.bandwidth(direction, 1 / LONG_S)
    sender.sendall(b"12")
    assert receive(receiver, 1) == b"1"
    assert nothing_came(receiver)
    link.proxy.heal()
    assert receive(receiver, 1) == b"2"


@pytest.mark.parametrize("direction", ["up", "down"])
def test_one_way_loss_holds_bytes_and_the_end_until_healed(link: Link, direction: Direction) -> None:
    """F-PART: the other way goes on, for a new connection too, and nothing is missing afterwards."""
    old = ends(link, direction)
    old[0].sendall(b"0")
    assert receive(old[1], 1) == b"0"
    link.proxy.drop(direction)
    new = ends(link, direction)
    for sender, receiver in (old, new):
        sender.sendall(b"12")
        receiver.sendall(b"back")
        assert receive(sender, 4) == b"back"
        sender.sendall(b"34")
        sender.shutdown(socket.SHUT_WR)
        receiver.sendall(b"again")
        assert receive(sender, 5) == b"again"
        assert nothing_came(receiver)
    link.proxy.heal()
    for _, receiver in (old, new):
        assert receive(receiver, 5) == b"1234"


def test_one_way_loss_holds_a_reset(link: Link) -> None:
    """F-PART: whoever is cut off does not learn that its peer was killed."""
    client, served = link.connect()
    link.proxy.drop("up")
    client.sendall(b"last words")
    reset(client)
    link.proxy.delay("down", 0.0)  # a turn of the proxy's later
    assert nothing_came(served)
    link.proxy.heal()
    assert receive(served, 10) == b"last words"
    assert_reset(served)


def test_a_partition_holds_both_ways_and_answers_no_connection(link: Link) -> None:
    """F-PART."""
    client, served = link.connect()
    link.proxy.partition()
    client.sendall(b"up")
    served.sendall(b"down")
    with pytest.raises(TimeoutError):
        link.dial(timeout_s=0.2)
    assert nothing_came(served)
    assert nothing_came(client)
    link.proxy.heal()
    assert receive(served, 2) == b"up"
    assert receive(client, 4) == b"down"
    assert_echo(*link.connect())


def test_a_connect_begun_in_a_partition_succeeds_after_it(link: Link) -> None:
    """F-PART: as the system asks again by itself."""
    link.proxy.partition()
    made: list[socket.socket] = []
    dialling = threading.Thread(target=lambda: made.append(link.dial()))
    dialling.start()
    with pytest.raises(TimeoutError):
        link.dial(timeout_s=0.2)
    assert made == []
    link.proxy.heal()
    dialling.join()
    served, _ = link.listener.accept()
    with served:
        assert_echo(made[0], served)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_held_direction_stops_its_sender(link: Link, direction: Direction) -> None:
    """F-PART: what the proxy holds is bounded, and arrives without a hole."""
    sender, receiver = ends(link, direction)
    link.proxy.partition()
    block = random.Random(3).randbytes(1024 * 1024)
    sent = 0
    sender.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        while sent < 256 * len(block):
            sent += sender.send(block[sent % len(block) :])
    assert sent < 128 * len(block)
    link.proxy.heal()
    received = receive(receiver, sent)
    assert received == (block * (sent // len(block) + 1))[:sent]


def test_cut_resets_present_connections_at_both_ends(link: Link) -> None:
    """F-PART: in a partition as well; a connection made later lives."""
    pairs = [link.connect() for _ in range(3)]
    link.proxy.cut()
    for client, served in pairs:
        assert_reset(client)
        assert_reset(served)
    client, served = link.connect()
    assert_echo(client, served)
    link.proxy.partition()
    served.sendall(b"held")
    link.proxy.cut()
    assert_reset(client)
    assert_reset(served)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("after_bytes", [1, 1000, 3_000_000])
def test_cut_in_the_middle_lets_so_many_bytes_arrive(link: Link, direction: Direction, after_bytes: int) -> None:
    """F-PART: exactly, also when the receiver takes them late."""
    sender, receiver = ends(link, direction)
    sender.sendall(b"before")
    assert receive(receiver, 6) == b"before"
    link.proxy.cut(after_bytes, direction)
    sent = random.Random(4).randbytes(after_bytes + 1000)

    def send() -> None:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sender.sendall(sent)

    sending = threading.Thread(target=send)
    sending.start()
    assert receive(receiver, after_bytes) == sent[:after_bytes]
    assert_reset(receiver)
    sending.join()
    assert_echo(*link.connect())


def test_heal_forgets_a_cut_to_come(link: Link) -> None:
    """F-PART."""
    client, served = link.connect()
    link.proxy.cut(2, "up")
    link.proxy.heal()
    assert_echo(client, served)


def test_refuse_is_for_new_connections(link: Link) -> None:
    """F-PART: on the same port again after healing, or silent when a partition follows."""
    client, served = link.connect()
    for _ in range(3):
        link.proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            link.dial()
        assert_echo(client, served)
        link.proxy.partition()
        with pytest.raises(TimeoutError):
            link.dial(timeout_s=0.1)
        link.proxy.refuse()
        link.proxy.heal()
        assert_echo(*link.connect())


def test_toxics_add_up(link: Link) -> None:
    """F-PART: and change while bytes pass."""
    client, served = link.connect()
    link.proxy.delay("up", 0.01, 0.01)
    link.proxy.slice("up", 500)
    link.proxy.bandwidth("up", 10_000_000)
    sent = random.Random(5).randbytes(300_000)
    sending = threading.Thread(target=client.sendall, args=(sent,))
    sending.start()
    assert receive(served, 20_000) == sent[:20_000]
    for _ in range(20):
        link.proxy.partition()
        link.proxy.heal()
    assert receive(served, 280_000) == sent[20_000:]
    sending.join()


def test_close_ends_everything() -> None:
    """F-PART: twice is once."""
    with linked() as link:
        client, served = link.connect()
        link.proxy.close()
        assert_reset(client)
        assert_reset(served)
        with pytest.raises(ConnectionRefusedError):
            link.dial()
        link.proxy.close()
        assert not any(link.proxy.address in thread.name for thread in threading.enumerate())
