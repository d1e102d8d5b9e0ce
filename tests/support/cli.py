"""The command line in this process, against the brokers of a registry."""

import json
from typing import Any

from click.testing import CliRunner, Result

from metaq.cli import commands


class Cli:
    """The command ``metaq`` with the arguments that a person types, and with ``METAQ_REGISTRY`` set."""

    def __init__(self, registry: str) -> None:
        self.registry = registry
        self._runner = CliRunner(env={"METAQ_REGISTRY": registry, "METAQ_BROKER": None})

    def run_any(self, *arguments: str, given: bytes = b"") -> Result:
        """Run to the end, whatever the exit code is."""
        done = self._runner.invoke(commands, list(arguments), input=given)
        assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, done.exception)
        return done

    def run(self, *arguments: str, code: int = 0, given: bytes = b"") -> Result:
        """Run to the end and check the exit code."""
        done = self.run_any(*arguments, given=given)
        assert done.exit_code == code, (arguments, done.exit_code, done.stdout, done.stderr)
        return done

    def text(self, *arguments: str, code: int = 0) -> str:
        """Standard output."""
        return self.run(*arguments, code=code).stdout

    def rows(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        """Its lines with ``--json``."""
        return [json.loads(line) for line in self.text(*arguments, "--json", code=code).splitlines()]

    def row(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Its only line with ``--json``."""
        (row,) = self.rows(*arguments, code=code)
        return row
