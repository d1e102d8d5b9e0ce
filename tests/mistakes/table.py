"""The list of mistakes in `mistakes.txt`: its form, and how one of them is played.

A mistake is a block of lines::

    $ metaq get ordrs
    exit 1
    | metaq: there is no topic ordrs; did you mean orders?

`env NAME=VALUE` and `stdin TEXT` may come before `exit`; the lines after `|` are standard error, those after `>`
standard output, which is of interest if there is no standard error. A line that begins with `given` runs a command before the
mistakes that follow, and `file NAME TEXT` writes a file. In all lines `{broker}`, `{registry}` and others stand for what
differs from run to run.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from click.testing import CliRunner

from metaq.cli import commands

FILE: Final = Path(__file__).with_name("mistakes.txt")
STARTING: Final = ("serve ", "registry ", "zookeeper ")
DEADLINE_S: Final = 60.0
_PROMPT: Final = "$ metaq "


class Mistake(NamedTuple):
    """What is typed, and the answer."""

    line: int
    typed: str
    env: dict[str, str]
    stdin: str
    exit: int
    stderr: str
    stdout: str
    """Empty when there is standard error: then it is not part of the answer."""

    @property
    def starts(self) -> bool:
        """True for a command that would run on if it found no mistake; it is played as a process, the others in this one."""
        return self.typed.startswith(STARTING)


class Step(NamedTuple):
    """What is done before the mistakes that follow: a command, or a file that is written."""

    line: int
    command: str = ""
    file: str = ""
    content: str = ""


def read() -> list[Mistake | Step]:
    """Return the list."""
    return list(_parse(FILE.read_text("utf-8").splitlines()))


def _parse(lines: list[str]) -> Iterator[Mistake | Step]:
    mistake: Mistake | None = None
    for number, line in enumerate([*lines, ""], 1):
        word, _, rest = line.partition(" ")
        if line.startswith(_PROMPT):
            mistake = Mistake(number, line.removeprefix(_PROMPT), {}, "", 0, "", "")
        elif not line or line.startswith("#"):
            if mistake is not None:
                yield mistake
            mistake = None
        elif mistake is None:
            name, _, content = rest.partition(" ")
            yield Step(number, command=rest) if word == "given" else Step(number, file=name, content=_unescaped(content))
        elif word == "env":
            name, _, value = rest.partition("=")
            mistake.env[name] = value
        elif word == "stdin":
            mistake = mistake._replace(stdin=_unescaped(rest))
        elif word == "exit":
            mistake = mistake._replace(exit=int(rest))
        elif word == "|":
            mistake = mistake._replace(stderr=f"{mistake.stderr}{rest}\n")
        else:
            assert word == ">", f"{FILE}:{number}: {line!r}"
            mistake = mistake._replace(stdout=f"{mistake.stdout}{rest}\n")


def _unescaped(text: str) -> str:
    return text.encode("latin-1").decode("unicode_escape")


class Player:
    """A person in a folder, with a broker."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """Take what the names in the list stand for; ``folder`` is where files are written."""
        self._names = names
        self._folder = Path(names["folder"])

    def _with_values(self, text: str) -> str:
        for name, value in self._names.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def _shown(self, text: str) -> str:
        """Return an answer as it stands in the list: with names, and without blanks at the ends of lines."""
        for name, value in self._names.items():
            text = text.replace(value, f"{{{name}}}")
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())

    def take(self, step: Step) -> None:
        """Do what a step says."""
        if step.file:
            path = self._folder / step.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._with_values(step.content).encode("latin-1"))
            path.chmod(0o644)  # whatever the umask of this machine is
            return
        found = self._run(step.command, {}, "")
        assert found[0] == 0, (step, found)

    def play(self, mistake: Mistake) -> Mistake:
        """Make a mistake, and return it with the answer that there was."""
        code, stderr, stdout = self._run(mistake.typed, mistake.env, mistake.stdin)
        return mistake._replace(exit=code, stderr=self._shown(stderr), stdout="" if stderr else self._shown(stdout))

    def _run(self, typed: str, env: Mapping[str, str], stdin: str) -> tuple[int, str, str]:
        arguments = shlex.split(self._with_values(typed))
        variables = {
            "METAQ_BROKER": self._names["broker"],
            "METAQ_REGISTRY": self._names["registry"],
            "XDG_CONFIG_HOME": str(self._folder / "config"),
            **{name: self._with_values(value) for name, value in env.items()},
        }
        if typed.startswith(STARTING):
            clean = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
            done = subprocess.run(
                [sys.executable, "-m", "metaq", *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                env={**clean, **{name: value for name, value in variables.items() if name in env or name == "XDG_CONFIG_HOME"}},
                cwd=self._folder,
                timeout=DEADLINE_S,
                check=False,
            )
            return done.returncode, done.stderr, done.stdout
        unset = {name: None for name in os.environ if name.startswith("METAQ_")}
        result = CliRunner(env={**unset, **variables}).invoke(commands, arguments, input=stdin, prog_name="metaq")
        crash = "" if result.exception is None or isinstance(result.exception, SystemExit) else f"{result.exception!r}\n"
        return result.exit_code, result.stderr + crash, result.stdout


def written(text: str, entries: list[Mistake]) -> str:
    """Return the text of the list with these answers in place of its own."""
    lines = text.splitlines()
    at = {mistake.line: mistake for mistake in entries}
    out: list[str] = []
    current: Mistake | None = None
    for number, line in enumerate(lines, 1):
        if current is not None and line.partition(" ")[0] in {"exit", "|", ">"}:
            continue
        if not line and current is not None:
            out += _answer(current)
            current = None
        current = at.get(number, current)
        out.append(line)
    if current is not None:
        out += _answer(current)
    return "\n".join(out) + "\n"


def _answer(mistake: Mistake) -> list[str]:
    shown = [("|", line) for line in mistake.stderr.splitlines()] + [(">", line) for line in mistake.stdout.splitlines()]
    return [f"exit {mistake.exit}", *(f"{mark} {line}".rstrip() for mark, line in shown)]
