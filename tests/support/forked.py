"""Python programs as processes that are forked from one that has imported the broker already.

A broker needs 0.45 s of processor time to start, of which 0.4 s are imports; the tests start a thousand. What is forked is a
process of its own like any other: its signals, files, memory and exit code are its own. Where a test is about how a program
starts or about all of its memory, ``fresh`` gives it an interpreter that has imported nothing.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

PRELOADED: Final = (
    "metaq.cli.host.registry",
    "metaq.cli.host.serve",
    "metaq.server.daemon",
    "metaq.server.replicas.replica",
    "tests.support.forked",
)
"""What each fork has imported when it begins. None of it makes an event loop, a thread or a connection."""

_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(list(PRELOADED))
_FRESH: Final = multiprocessing.get_context("spawn")


def start_module(command: Sequence[str], stdout: Path, stderr: Path, *, fresh: bool = False) -> BaseProcess:
    """Start ``python -m`` with a module and its arguments, without input and without settings of metaq in its environment.

    What it prints is added to two files. It ends with this process at the latest.
    """
    for path in (stdout, stderr):
        path.touch()  # who waits for a line may read at once
    environment = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
    process = (_FRESH if fresh else _FORKS).Process(
        target=_run_module, args=(command, environment, os.getcwd(), stdout, stderr), name=command[0], daemon=True
    )
    process.start()
    return process


def _run_module(command: Sequence[str], environment: dict[str, str], folder: str, stdout: Path, stderr: Path) -> None:
    """Be that program, in the new process."""
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    module, *sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__", alter_sys=True)
