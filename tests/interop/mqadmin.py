"""RocketMQ's admin tool, 4.9.8, unmodified, one process a command."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

from tests.interop.clients import JVM_FLAGS, java_class_path

MAIN: Final = "org.apache.rocketmq.tools.command.MQAdminStartup"
COMMAND_SECONDS: Final = 120
LOGGING: Final = """<configuration>
  <appender name="stderr" class="ch.qos.logback.core.ConsoleAppender">
    <target>System.err</target>
    <encoder><pattern>%level %logger{0} %msg%n</pattern></encoder>
  </appender>
  <root level="ERROR"><appender-ref ref="stderr"/></root>
</configuration>
"""


class AdminFailed(AssertionError):
    """The command ended with another code than 0, or printed an exception; it has no exit code for its own failures."""


class AdminTool:
    """The tool with ``registry`` as its name server; ``home`` takes what it wants to read and to write."""

    def __init__(self, registry: str, home: Path) -> None:
        (home / "conf").mkdir(parents=True)
        (home / "conf" / "logback_tools.xml").write_text(LOGGING, "utf-8")
        self._registry = registry
        self._program = ["java", *JVM_FLAGS, f"-Duser.home={home}", f"-Drocketmq.home.dir={home}"]
        self._program += ["-cp", java_class_path(), MAIN]

    def run(self, command: str, *arguments: str) -> str:
        """What the command prints; :class:`AdminFailed`."""
        program = [*self._program, command, "-n", self._registry, *arguments]
        done = subprocess.run(program, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        printed = done.stdout + done.stderr
        if done.returncode != 0 or re.search(r"\w(Exception|Error)\b", printed):
            raise AdminFailed(f"{command} {' '.join(arguments)} ended with {done.returncode} and printed:\n{printed}")
        return done.stdout

    def table(self, command: str, *arguments: str) -> list[list[str]]:
        """The rows that a command prints, without the heading that begins with #."""
        lines = self.run(command, *arguments).splitlines()
        return [line.split() for line in lines if line.strip() and not line.startswith("#")]
