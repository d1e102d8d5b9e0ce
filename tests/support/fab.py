"""``fab`` as a person types it, and a cluster.yaml for machines that sshd stands for."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

ROOT: Final = Path(__file__).parents[2]


class Done(NamedTuple):
    """How a task ended."""

    code: int
    output: str


class Fab:
    """The tasks of ``fabfile.py`` for one cluster.yaml."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.environment: dict[str, str] = {}

    def configure(self, hosts: dict[str, Any], **settings: Any) -> None:
        """Write cluster.yaml."""
        self.file.write_text(yaml.safe_dump({**settings, "hosts": hosts}))

    def start(self, task: str, *flags: str) -> "subprocess.Popen[str]":
        """Begin a task."""
        command = [sys.executable, "-m", "fabric", "--search-root", str(ROOT), task, "--cluster", str(self.file), *flags]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **self.environment},
        )

    def run_any(self, task: str, *flags: str) -> Done:
        """Run a task to its end, whatever that is."""
        with self.start(task, *flags) as process:
            output, _ = process.communicate()
        return Done(process.returncode, output)

    def run(self, task: str, *flags: str) -> str:
        """Its output; it succeeds."""
        done = self.run_any(task, *flags)
        assert done.code == 0, done.output
        return done.output

    def refused(self, task: str, *flags: str) -> str:
        """Its output; it fails, with a reason and no stack."""
        done = self.run_any(task, *flags)
        assert done.code == 1 and "Traceback" not in done.output, done
        return done.output
