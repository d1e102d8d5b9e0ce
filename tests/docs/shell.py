"""A page played as a reader does it: its programs are saved, and its lines are typed into one shell, one after the other."""

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from tests.docs.examples import Fence, matches, steps

PROMPT: Final = "$ "
DEADLINE_S: Final = 240.0
"""For one line, on a machine that does much else."""
LOOK_PAUSE_S: Final = 0.25
_LOOK: Final = re.compile(r"(?:cat|grep|tail|metaq \w+ (?:list|show|lag|tail))\b")
NAMED: Final = re.compile(r"# (\w+\.py)\n")
"""The first line of a program that is to be saved."""
_END: Final = "end of the line with status"


class Typed(NamedTuple):
    """A line that was typed, and how long it took until it had printed what the page shows."""

    line: str
    seconds: float


class Shell:
    """A bash from entering the ``with`` block until leaving it, when all that it has started ends, too.

    It has one output, in which errors are, too, as on a terminal.
    """

    def __init__(self, folder: Path, environment: dict[str, str], replaced: Callable[[str], str] = lambda text: text) -> None:
        """``replaced`` makes what the page says about ports true."""
        self._folder = folder
        self._environment = environment
        self._replaced = replaced

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def play(self, page: list[Fence]) -> list[Typed]:
        """Save the programs and type the lines of these fences; each line must print what stands below it."""
        typed: list[Typed] = []
        for fence in page:
            text = self._replaced(fence.text)
            if fence.kind == "python" and (named := NAMED.match(text)) is not None:
                (self._folder / named[1]).write_text(text, "utf-8")
            elif fence.kind == "console":
                for step in steps(text, PROMPT):
                    typed += [self._type(line, "", fence.place) for line in step.typed[:-1]]
                    typed.append(self._type(step.typed[-1], step.shown, fence.place))
        return typed

    def _type(self, line: str, shown: str, place: str) -> Typed:
        """Type a line. One that only looks is typed again until it shows what is expected, as a reader does."""
        began = time.monotonic()
        while True:
            status, printed = self._run(line, began + DEADLINE_S)
            if status == 0 and matches(shown, printed):
                seconds = time.monotonic() - began
                print(f"{seconds:6.1f} s  {line}", flush=True)
                return Typed(line, seconds)
            is_late = time.monotonic() > began + DEADLINE_S
            assert _LOOK.match(line) and not is_late, f"{place}: {line} ends with {status} and prints\n{printed}"
            time.sleep(LOOK_PAUSE_S)

    def _run(self, line: str, until: float) -> tuple[int, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\necho {_END} $?\n".encode())
        self._process.stdin.flush()
        found = b""
        end = re.compile(rf"^{_END} (\d+)\n".encode(), re.MULTILINE)
        while (ended := end.search(found)) is None:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            assert chunk, f"no end of {line}; it has printed\n{found.decode()}"
            found += chunk
        return int(ended[1]), found[: ended.start()].decode()
