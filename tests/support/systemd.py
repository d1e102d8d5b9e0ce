"""The socket to which systemd listens, for tests that play systemd."""

import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

DEADLINE_S: Final = 120.0


class NotifySocket:
    """Takes datagrams at ``path``; ``lines`` is all that was ever told, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __enter__(self) -> Self:
        self._socket.bind(str(self.path))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

    def wait_for(self, line: str, times: int = 1) -> list[str]:
        """Wait until ``line`` was told so often since the last call; returns what was told since then, up to it."""
        begin, end = len(self.lines), time.monotonic() + DEADLINE_S
        while self.lines[begin:].count(line) < times:
            self._socket.settimeout(max(0.01, end - time.monotonic()))
            try:
                self.lines += self._socket.recv(65536).decode().split("\n")
            except TimeoutError:
                raise AssertionError(f"not {times} × {line} within {DEADLINE_S} s, but {self.lines[begin:]}") from None
        return self.lines[begin:]
