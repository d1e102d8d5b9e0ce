"""Progress of long commands: on a terminal, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.broker import BrokerProcess
from tests.support.terminal import Terminal

DEADLINE_S = 60.0
LINES = 60_000


class Seen(NamedTuple):
    """What a command wrote."""

    printed: bytes
    """To standard output."""
    drawn: str
    """To standard error, which is a terminal."""


def on_terminal(*arguments: str) -> Seen:
    """Run ``metaq`` with standard error on a terminal, and standard output to a file of its own."""
    with os.fdopen(os.memfd_create("printed"), "w+b") as printed:
        with Terminal(*arguments, stdout=printed.fileno()) as terminal:
            assert terminal.end() == 0, terminal.drawn
        printed.seek(0)
        return Seen(printed.read(), terminal.drawn)


def off_terminal(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "metaq", *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )


def test_progress_is_drawn_on_a_terminal_only(broker: BrokerProcess, tmp_path: Path) -> None:
    """19.1: how many, how fast, and how long the rest will take; standard output has what it has without a terminal."""
    file = tmp_path / "lines"
    file.write_bytes(b"".join(b"line %d\n" % number for number in range(LINES)))
    at = ("--broker", broker.address)
    stored = on_terminal("put", "drawn", "--lines", str(file), *at)
    assert stored.printed == b"stored %d messages in drawn-0 from 0 on\n" % LINES
    for words in ("storing", "60,000 lines, ", "/s", "0:00"):
        assert words in stored.drawn
    read = on_terminal("get", "drawn", "--count", str(LINES), *at)
    assert read.printed == file.read_bytes()
    assert "reading" in read.drawn and "60,000 messages, " in read.drawn
    without = off_terminal("get", "drawn", *at)
    assert (without.stdout, without.stderr) == (file.read_text(), "")
    exported = on_terminal("offsets", "export", "--out", "-", "--registry", broker.registry)
    assert "exporting" in exported.drawn and b"exporting" not in exported.printed


def test_a_data_folder_is_verified_with_progress(tmp_path: Path) -> None:
    """19.1: in bytes of the log."""
    with BrokerProcess(tmp_path / "data") as broker:
        off_terminal("put", "verified", "hello", "--broker", broker.address)
        assert broker.terminate() == 0
    checked = on_terminal("verify", str(tmp_path / "data"))
    assert checked.printed.startswith(b"checked 1 records")
    assert "checking" in checked.drawn


def test_without_a_terminal_nothing_is_loaded() -> None:
    """19.1: no cost when off."""
    program = """
import sys
from metaq.cli.progress import progress
with progress("counting", "items") as bar:
    items = [1, 2, 3]
    assert bar.watch(items) is items
    bar.reach(3, 1.0)
assert "rich" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert (done.stdout, done.stderr) == ("", "")
