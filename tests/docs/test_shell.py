"""Pages are played honestly: what is not as the page shows fails, and nothing that a page has started is left."""

import os
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import Fence
from tests.docs.shell import Shell
from tests.support.broker import wait_until

DEADLINE_S: Final = 30.0


def page(*fences: tuple[str, str]) -> list[Fence]:
    return [Fence("page", kind, text) for kind, text in fences]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path, {"PATH": os.environ["PATH"]}, lambda text: text.replace("8123", "20001"))


def test_programs_are_saved_and_lines_share_one_shell(shell: Shell) -> None:
    program = ("python", "# ask.py\nprint('port 8123')\n")
    with shell:
        typed = shell.play(page(program, ("console", "$ name=ask\n$ cat $name.py\n# ask.py\nprint('port 8123')\n")))
    assert [one.line for one in typed] == ["name=ask", "cat $name.py"]


@pytest.mark.parametrize("text", ["$ echo one\ntwo\n", "$ false\n", "$ echo one >&2\n", "$ echo one\n$ true\n"])
def test_what_is_not_as_shown_fails(shell: Shell, text: str) -> None:
    with shell, pytest.raises(AssertionError, match="page: "):
        shell.play(page(("console", text)))


def test_a_line_that_only_looks_is_typed_until_it_shows_it(shell: Shell) -> None:
    with shell:
        shell.play(page(("console", "$ (sleep 0.5; echo late > late.log) &\n$ cat late.log\nlate\n")))


def runs(pid: str) -> bool:
    """Whether a process runs: one that nobody has waited for yet has no command line any more."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


def test_nothing_is_left(shell: Shell, tmp_path: Path) -> None:
    with shell:
        shell.play(page(("console", "$ sleep 1000 &\n$ echo $! > pid\n")))
        pid = (tmp_path / "pid").read_text().strip()
        wait_until(lambda: runs(pid), DEADLINE_S, "it has begun")
    wait_until(lambda: not runs(pid), DEADLINE_S, "it has ended")
