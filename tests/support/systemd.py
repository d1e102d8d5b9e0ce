"""The socket to which systemd listens, for tests that play systemd."""

import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.support.broker import wait_until

DEADLINE_S: Final = 120.0


class NotifySocket:
    """Takes datagrams at ``path``; ``lines`` is all that was ever told, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        self._looked_at = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # as they come, as systemd does: the kernel keeps a few, and who tells more does not wait
        self._taking = threading.Thread(target=self._take)

    def __enter__(self) -> Self:
        self._socket.bind(str(self.path))
        self._taking.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._taking.join()
        self._socket.close()

    def _take(self) -> None:
        while told := self._socket.recv(65536):
            self.lines += told.decode().split("\n")

    def wait_for(self, line: str, times: int = 1) -> list[str]:
        """Wait until ``line`` was told so often since the last call; returns what was told since then, up to it."""
        begin = self._looked_at

        def told() -> bool:
            return self.lines[begin:].count(line) >= times

        wait_until(told, DEADLINE_S, f"{times} x {line} is told")
        for _ in range(times):
            self._looked_at = self.lines.index(line, self._looked_at) + 1
        return self.lines[begin : self._looked_at]
