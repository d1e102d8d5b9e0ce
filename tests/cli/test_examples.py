"""The examples in the help of all commands: each command has some, and click takes them."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from metaq.cli import commands
from metaq.cli.host.settings import SettingsCommand
from metaq.config import FIELDS, load

OPERATORS = frozenset(("|", "||", "&&", ">", ">>", "<"))
FILES = ("broker.yaml", "body.json", "orders.txt", "users.yaml", "week.parquet", "conf/broker.yaml")
FOLDERS = ("data", "conf")
"""What the examples name, and must exist for them."""


def leaves(command: click.Command, typed: str, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Every command as it is typed."""
    if not isinstance(command, click.Group):
        yield typed, command
        return
    for name in command.list_commands(context):
        one = command.get_command(context, name)
        assert one is not None
        yield from leaves(one, f"{typed} {name}", context)


ALL = dict(leaves(commands, "metaq", click.Context(commands)))


def examples_of(command: click.Command) -> list[str]:
    begin, heading, *lines = (command.epilog or "\b\nExamples:").splitlines()
    assert (begin, heading) == ("\b", "Examples:")
    return [line.strip() for line in lines]


def words_of(example: str) -> list[str]:
    """The words up to a comment, or to an operator of the shell."""
    words = shlex.split(example, comments=True)
    ends = [at for at, word in enumerate(words) if word in OPERATORS]
    return words[: min(ends, default=len(words))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    for name in FILES:
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("typed", list(ALL))
def test_a_command_has_examples_that_are_right(typed: str, folder: Path) -> None:
    """19.1: its own arguments and options, of the right kinds; settings are within their bounds, too."""
    examples = examples_of(ALL[typed])
    own = {typed, f"metaq {ALL[typed].name}"}  # one command has a short name, too
    assert any(example == name or example.startswith(f"{name} ") for example in examples for name in own)
    for example in examples:
        program, *words = words_of(example)
        assert program == "metaq"
        command: click.Command = commands
        context = click.Context(commands)
        while isinstance(command, click.Group):
            found = command.get_command(context, words[0])
            assert found is not None, example
            command, name = found, words.pop(0)
        with command.make_context(name, list(words), parent=context) as made:
            if isinstance(command, SettingsCommand):
                given = {name: value for name, value in made.params.items() if name in FIELDS and value is not None}
                load(None, {}, given)


def test_wrong_examples_would_be_found(folder: Path) -> None:
    """19.1: make_context refuses what click refuses."""
    for words in (["orders", "--no-such-option"], [], ["orders", "--count", "many"]):
        with pytest.raises(click.UsageError):
            ALL["metaq get"].make_context("get", list(words))
