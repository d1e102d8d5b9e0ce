"""Commands that run tasks, such as ``celery worker``: each a group of processes, which ends with its test at the latest."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.docs.examples import ROOT


class WorkerProcess:
    """A command of this environment, from its start to its end. What it prints is appended to ``log``."""

    def __init__(self, log: Path, *words: str, **environment: str) -> None:
        """Start it in the folder of its log. It imports what this process can import, and the modules of that folder."""
        self.log = log
        command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
        path = os.pathsep.join([str(log.parent), str(ROOT), *filter(None, sys.path)])
        environ = {**os.environ, "PYTHONPATH": path, **environment}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=log.parent, env=environ, stdout=output, stderr=output, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to it and its children."""
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class TaskFolder:
    """A folder with a program ``tasks.py``, whose tasks leave files there.

    Each makes ``begun/NAME PID`` when it begins and ``done/NAME`` when it is done, and one may wait for the file ``go on``.
    """

    def __init__(self, folder: Path, program: str) -> None:
        self._folder = folder
        for name in ("begun", "done"):
            (folder / name).mkdir()
        (folder / "tasks.py").write_text(program, "utf-8")

    def begun(self) -> dict[str, int]:
        """The processes in which tasks have begun last."""
        files = sorted((self._folder / "begun").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return {path.name.split()[0]: int(path.name.split()[1]) for path in files}

    def done(self) -> set[str]:
        """The tasks that are done."""
        return {path.name for path in (self._folder / "done").iterdir()}

    def go_on(self) -> None:
        """Let the task go on that waits."""
        (self._folder / "go on").touch()

    @contextmanager
    def run(self, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a command there until the block is left."""
        worker = WorkerProcess(self._folder / "log", *words)
        try:
            yield worker.process
        finally:
            worker.kill()
