"""RocketMQ's admin tool, 4.9.8, unmodified."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any, Final

from tests.interop.clients import ClientProcess, java_flags

MAIN: Final = "org.apache.rocketmq.tools.command.MQAdminStartup"
PROCESS_SECONDS: Final = 120


class AdminFailed(AssertionError):
    """The command printed an exception, or ended with another code than 0; its own failures do not change its code."""


def checked(command: str, printed: str) -> str:
    if re.search(r"\w(Exception|Error)\b", printed):
        raise AdminFailed(f"{command} printed:\n{printed}")
    return printed


def run_process(registry: str, command: str, *arguments: str) -> str:
    """Return what the command prints as a process of its own, which takes seconds to end after its work.

    Raise :class:`AdminFailed` when it fails.
    """
    program = ["java", *java_flags(), MAIN, command, "-n", registry, *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)
    if done.returncode != 0:
        raise AdminFailed(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return checked(command, done.stdout + done.stderr)


class AdminTool:
    """The tool's main class, command after command in one Java process, with ``registry`` as its name server."""

    def __init__(self, driver: ClientProcess, registry: str) -> None:
        self._driver = driver
        self._registry = registry

    def run(self, command: str, *arguments: str) -> str:
        """Return what the command prints; raise :class:`AdminFailed` when it fails."""
        printed: str = self._driver.call("mqadmin", arguments=[command, "-n", self._registry, *arguments])
        return checked(command, printed)

    def table(self, command: str, *arguments: str) -> list[list[str]]:
        """The rows that a command prints, without the heading that begins with #."""
        lines = self.run(command, *arguments).splitlines()
        return [line.split() for line in lines if line.strip() and not line.startswith("#")]

    def route(self, topic: str) -> dict[str, Any]:
        """A topic's route. The tool prints JSON but for the keys of maps that are numbers."""
        printed = self.run("topicRoute", "-t", topic)
        route: dict[str, Any] = json.loads(re.sub(r"([{,]\s*)(\d+):", r'\1"\2":', printed))
        return route
