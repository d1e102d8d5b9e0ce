"""A TCP proxy on loopback that delays, slices, throttles, holds back and cuts what passes through it.

    client ── up ──▶ Proxy ── up ──▶ target
    client ◀─ down ─ Proxy ◀─ down ─ target

A direction is a queue, as a network is: bytes, the end of the stream (FIN) and a reset (RST) of one side come out at the
other in the order in which they went in, whatever holds them up. Nothing is ever lost from the middle: a direction that
"drops" holds what was sent, and delivers it after ``heal()``, as the retransmissions of TCP would.
"""

import contextlib
import ctypes
import fcntl
import functools
import itertools
import math
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from random import Random
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Final, Literal

from tests.support.ports import hold_port

Direction = Literal["up", "down"]

# A direction of a connection that holds so many bytes reads no more: the buffers of the sender's system fill up.
HELD_BYTES: Final = 4 * 1024 * 1024
CHUNK_BYTES: Final = 256  # that a chunk takes beside its data, about
READ_BYTES: Final = 256 * 1024
PAUSE_S: Final = 0.001  # between two slices, so that the peer reads them apart; the least that a selector waits for
BURST_S: Final = 0.01  # a limited direction passes on what it may in so long at once
CHANGE_DEADLINE_S: Final = 30.0
NEVER: Final = math.inf
NO_CUT: Final = 1 << 62  # more bytes than ever pass
SO_ATTACH_FILTER: Final = 26  # from asm-generic/socket.h, which the socket module leaves out; needs no privilege
SO_DETACH_FILTER: Final = 27
DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)  # struct sock_filter: BPF_RET with 0 bytes of the packet


@dataclass
class _Toxics:  # of one direction of all connections
    delay_s: float = 0.0
    jitter_s: float = 0.0
    max_piece: int = 0
    bytes_per_s: float = math.inf
    held: bool = False


@dataclass(slots=True)
class _Chunk:  # what one read brought
    read_at: float
    luck: float
    data: memoryview  # empty for the end of the stream, by a reset or in good order
    reset: bool


class _Pipe:
    """One direction of one connection: what was read from ``source`` and ``sink`` did not take yet."""

    def __init__(self, source: socket.socket, sink: socket.socket, toxics: _Toxics, seed: str) -> None:
        self.source, self.sink, self.toxics = source, sink, toxics
        self.reverse: _Pipe
        self.blocked = False  # until the sink is writable
        self.finished = self.broken = False  # the end in good order was passed on; both sockets are to be reset
        self.cut_after = NO_CUT
        self.pace_until = 0.0  # no piece before
        self.watched = 0  # the events of the source that the selector watches for
        self.sends = 0  # pieces that the sink took
        self._chunks: deque[_Chunk] = deque()
        self._size = 0
        self._ended = self._source_reset = self._sink_lost = False
        # Two, so that the slices do not depend on how many reads there were.
        self._jitter, self._pieces = Random(f"{seed} jitter"), Random(f"{seed} pieces")

    @property
    def reads(self) -> bool:
        return not self._ended and self._size + CHUNK_BYTES * len(self._chunks) < HELD_BYTES

    def read(self) -> None:
        try:
            data = self.source.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._source_reset, data = True, b""
        self._ended = not data
        if self._ended or not self._sink_lost:
            self._append(data)

    def _append(self, data: bytes) -> None:
        self._chunks.append(_Chunk(time.monotonic(), self._jitter.random(), memoryview(data), self._source_reset))
        self._size += len(data)

    def deliver(self, now: float) -> float:
        """Pass on what is due. Returns when to be asked again, ``NEVER`` when a socket will tell."""
        while self.cut_after != 0:
            if self.blocked or self.toxics.held or not self._chunks:
                return NEVER
            first = self._chunks[0]
            due = max(first.read_at + self.toxics.delay_s + self.toxics.jitter_s * first.luck, self.pace_until)
            if due > now:
                return due
            try:
                if first.data:
                    self._send(first, now)
                    continue
                self._chunks.popleft()
                if first.reset:
                    self.broken = True
                elif not self._sink_lost:
                    self.sink.shutdown(socket.SHUT_WR)
                    self.finished = True
            except BlockingIOError:
                self.blocked = True
            except OSError:
                self._lose_sink()
                return now
        # A reset throws away what its sender's system still holds: first all must have arrived.
        self.broken = not any(fcntl.ioctl(self.sink, termios.TIOCOUTQ, bytes(4)))
        return now + PAUSE_S

    def _send(self, chunk: _Chunk, now: float) -> None:
        size = min(len(chunk.data), self.cut_after, max(1, self.toxics.bytes_per_s * BURST_S))
        if self.toxics.max_piece:
            size = min(size, self._pieces.randint(1, self.toxics.max_piece))
        sent = self.sink.send(chunk.data[: int(size)])
        self.sends += 1
        chunk.data = chunk.data[sent:]
        if not chunk.data:
            self._chunks.popleft()
        self._size -= sent
        self.cut_after -= sent
        burst_end = max(self.pace_until, now - BURST_S) + sent / self.toxics.bytes_per_s
        self.pace_until = max(burst_end, now + PAUSE_S) if self.toxics.max_piece else burst_end

    def _lose_sink(self) -> None:
        """``sink`` was reset: what comes for it is thrown away, and the source hears of it by the way back."""
        self._sink_lost, self._size = True, 0
        self._chunks.clear()
        self.reverse._source_reset = True
        if self.reverse._ended:
            self.reverse._append(b"")


_Connection = tuple[_Pipe, _Pipe]  # up, down


class Proxy(contextlib.AbstractContextManager["Proxy"]):
    """Listens on ``address`` (HOST:PORT, of a free ``port``) and connects to the target for each connection it accepts.

    Works in a thread of its own, from its construction until ``close()`` or the end of the ``with`` block. A toxic is in
    force, for present and new connections alike, when the call that sets it returns; a connection is present as soon as
    its client's ``connect`` returned. Toxics add up until ``heal()``. All that is random follows from ``seed``, the
    number of the connection and the direction. A target that refuses shows as a reset: the client is connected by then.
    """

    def __init__(self, target_host: str, target_port: int, *, seed: int = 0) -> None:
        self._target, self._seed, self._numbers = (target_host, target_port), seed, itertools.count(1)
        self._toxics: dict[Direction, _Toxics] = {"up": _Toxics(), "down": _Toxics()}
        self._closing = False
        self._due: dict[_Connection, float] = {}
        self._changes: SimpleQueue[tuple[Callable[[], None], threading.Event]] = SimpleQueue()
        self._selector = DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, EVENT_READ, self._make_changes)
        # Never listens: it keeps the port while ``refuse()`` has closed the listener.
        self._holder = hold_port()
        self.port: int = self._holder.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._listener: socket.socket | None = None
        self._listen()
        self._thread = threading.Thread(target=self._run, name=f"proxy {self.address}", daemon=True)
        self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset all connections and free the port; once more changes nothing."""
        if self._thread.is_alive():
            self._change(lambda: setattr(self, "_closing", True))
            self._thread.join()

    def delay(self, direction: Direction, seconds: float, jitter: float = 0.0) -> None:
        """Every read is delivered ``seconds`` to ``seconds + jitter`` later, in order."""
        self._set(direction, delay_s=seconds, jitter_s=jitter)

    def slice(self, direction: Direction, max_bytes: int) -> None:
        """Deliver pieces of 1 to ``max_bytes`` bytes, one a millisecond at most."""
        assert max_bytes > 0, "a slice holds a byte at least"
        self._set(direction, max_piece=max_bytes)

    def bandwidth(self, direction: Direction, bytes_per_s: float) -> None:
        """Limits each connection for itself."""
        assert bytes_per_s > 0, "to pass nothing is drop()"
        self._set(direction, bytes_per_s=bytes_per_s)

    def drop(self, direction: Direction) -> None:
        """One-way loss: bytes, ends and resets are held until ``heal()``. New connections are still made."""
        self._set(direction, held=True)

    def partition(self) -> None:
        """Loss both ways. The SYN of a new connection is not answered: ``connect`` waits, as across a real partition, and
        succeeds after ``heal()`` when its system asks again, which is 1, 3, 7 … seconds after the first time."""
        self.drop("up")
        self.drop("down")
        program = ctypes.create_string_buffer(DROP_ALL)
        filters = struct.pack("HP", 1, ctypes.addressof(program))  # struct sock_fprog
        self._change(lambda: self._listen().setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filters))

    def cut(self, after_bytes: int = 0, direction: Direction = "down") -> None:
        """Reset (RST) present connections at both ends, whatever is held: now, or each as soon as its receiver in
        ``direction`` has got exactly ``after_bytes`` further bytes."""

        def cut_present() -> None:
            for connection in list(self._due):
                if after_bytes:
                    connection[("up", "down").index(direction)].cut_after = after_bytes
                else:
                    self._end(connection, reset=True)

        self._change(cut_present)

    def refuse(self) -> None:
        """New connections are refused, present ones go on."""
        self._change(self._stop_listening)

    def sends(self, direction: Direction) -> int:
        """Into how many pieces it has cut what passed on present connections; the kernel may join them on the way."""
        found: list[int] = []
        self._change(lambda: found.append(sum(pipes[direction == "down"].sends for pipes in self._due)))
        return found[0]

    def heal(self) -> None:
        """No toxics, no cut to come, and new connections are accepted: what is held or waits is delivered at once."""

        def accept_all() -> None:
            with contextlib.suppress(FileNotFoundError):  # there is no filter without a partition
                self._listen().setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
            for pipe in itertools.chain.from_iterable(self._due):
                pipe.cut_after = NO_CUT

        self._change(accept_all)
        for direction in self._toxics:
            self._set(direction, **vars(_Toxics()))

    def _set(self, direction: Direction, **values: float) -> None:
        self._change(lambda: vars(self._toxics[direction]).update(values))

    def _change(self, change: Callable[[], None]) -> None:
        """Make ``change`` in the proxy's thread, which alone touches its sockets."""
        made = threading.Event()
        self._changes.put((change, made))
        self._wake.send(b"\0")
        assert made.wait(CHANGE_DEADLINE_S), f"the thread of proxy {self.address} does not answer"

    def _make_changes(self, _events: int) -> None:
        self._woken.recv(1)
        change, made = self._changes.get()
        self._accept()
        change()
        for connection in list(self._due):
            for pipe in connection:
                pipe.pace_until = 0.0  # of toxics that may be no more
            self._serve(connection)
        made.set()

    def _run(self) -> None:
        try:
            while not self._closing:
                wait = min(self._due.values(), default=NEVER) - time.monotonic()
                for key, events in self._selector.select(None if wait == NEVER else wait):
                    key.data(events)
                for connection, due in list(self._due.items()):
                    if due <= time.monotonic():
                        self._serve(connection)
        finally:
            for connection in list(self._due):
                self._end(connection, reset=True)
            self._stop_listening()
            for own in (self._selector, self._holder, self._wake, self._woken):
                own.close()

    def _listen(self) -> socket.socket:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self._listener.setblocking(False)
            self._selector.register(self._listener, EVENT_READ, self._accept)
        return self._listener

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, _events: int = 0) -> None:
        while self._listener is not None:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            target = socket.socket()
            for end in (client, target):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seed = f"{self._seed} {next(self._numbers)}"
            up = _Pipe(client, target, self._toxics["up"], f"{seed} up")
            down = _Pipe(target, client, self._toxics["down"], f"{seed} down")
            up.reverse, down.reverse = down, up
            up.blocked = True  # until it is connected
            target.connect_ex(self._target)  # a failure is met where the target is read
            self._serve((up, down))

    def _ready(self, connection: _Connection, pipe: _Pipe, events: int) -> None:
        """The socket that is the source of ``pipe`` and the sink of its reverse can be read or written."""
        if connection not in self._due:  # another event of the same turn ended it
            return
        if events & EVENT_WRITE:
            pipe.reverse.blocked = False
        if events & EVENT_READ:
            pipe.read()
        self._serve(connection)

    def _serve(self, connection: _Connection) -> None:
        """Pass on what is due, end what has ended, and watch for what comes next."""
        now = time.monotonic()
        self._due[connection] = min(pipe.deliver(now) for pipe in connection)
        if any(pipe.broken for pipe in connection):
            self._end(connection, reset=True)
        elif all(pipe.finished for pipe in connection):
            self._end(connection, reset=False)
        else:
            for pipe in connection:
                before, pipe.watched = pipe.watched, pipe.reads * EVENT_READ | pipe.reverse.blocked * EVENT_WRITE
                if before and not pipe.watched:
                    self._selector.unregister(pipe.source)
                elif before != pipe.watched:
                    watch = self._selector.modify if before else self._selector.register
                    watch(pipe.source, pipe.watched, functools.partial(self._ready, connection, pipe))

    def _end(self, connection: _Connection, *, reset: bool) -> None:
        del self._due[connection]
        for pipe in connection:
            if pipe.watched:
                self._selector.unregister(pipe.source)
            if reset:
                pipe.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # on, 0 s
            pipe.source.close()
