"""A command on a terminal, as a person sees it."""

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tests.support.broker import wait_until

DEADLINE_S = 60.0


class Terminal:
    """``metaq`` with its input, its errors and, unless ``stdout`` is given, its output on a terminal."""

    def __init__(self, *arguments: str, stdout: int | None = None, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40", **variables}
        environment = {name: value for name, value in environment.items() if name != "NO_COLOR" or name in variables}
        command: Sequence[str] = [sys.executable, "-m", "metaq", *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs if stdout is None else stdout,
            stderr=theirs,
            env=environment,
            start_new_session=True,  # it asks for no password on the terminal of whoever runs the tests
        )
        os.close(theirs)
        self._drawn = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        os.close(self._ours)

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._ours, 65536)
            except OSError:  # the other side is closed
                return
            if not part:
                return
            self._drawn += part

    @property
    def drawn(self) -> str:
        """All that was written to it, with its colours."""
        return self._drawn.decode(errors="replace")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.drawn, DEADLINE_S, f"{text!r} is on the terminal, which has {self.drawn[-2000:]!r}")

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Wait for the end of the command. Return its exit code."""
        code = self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return code
