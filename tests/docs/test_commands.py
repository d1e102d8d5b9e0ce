"""Commands that pages name in passing: each exists, with its options; and those of the migration are played."""

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from metaq.cli import commands
from tests.docs.examples import ROOT, fences
from tests.docs.test_readme import play_in_shell
from tests.support.broker import BrokerProcess

DOCUMENTS: Final = [Path("README.md"), *sorted(path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md"))]
_COMMAND: Final = re.compile(r"(?:^    |`|^\$ )(metaq(?: [a-z-][^`\n|]*)?)(?:`|\||$)", re.MULTILINE)


def named(document: Path) -> Iterator[list[str]]:
    """The words of each command in code of a page."""
    for text in _COMMAND.findall((ROOT / document).read_text("utf-8")):
        with contextlib.suppress(ValueError):  # what goes on behind a quote
            yield shlex.split(text.partition("…")[0].replace("\\", ""))


def options(command: click.Command, *, with_value: bool = False) -> set[str]:
    """The options of a command, or those that take a value."""
    found = [one for one in command.params if isinstance(one, click.Option) and not (with_value and one.is_flag)]
    return {name for one in found for name in (*one.opts, *one.secondary_opts)}


def unknown(words: list[str]) -> list[str]:
    """What of a command does not exist: a name of its, or options; nothing when it is right."""
    command: click.Command = commands
    known, context, before = options(commands) | {"--help"}, click.Context(commands), ""
    for word in words[1:]:
        if isinstance(command, click.Group) and not word.startswith("-") and before not in options(command, with_value=True):
            found = command.get_command(context, word)
            if found is None:
                return [word]
            command, known = found, known | options(found)
        before = word
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_that_a_page_names_exist(document: Path) -> None:
    """E-04."""
    wrong = [(" ".join(words), missing) for words in named(document) if (missing := unknown(words))]
    assert wrong == []


def test_what_does_not_exist_is_found() -> None:
    """Names and options, at any depth; what an option is given is no name."""
    assert unknown(["metaq", "topic", "creat", "orders"]) == ["creat"]
    assert unknown(["metaq", "topic", "create", "orders", "--partition=4", "--ordered"]) == ["--partition=4"]
    assert unknown(["metaq", "--user", "root", "group", "lag", "billing", "--json"]) == []
    assert sum(len(list(named(document))) for document in DOCUMENTS) > 200


def test_the_steps_of_the_migration(broker: BrokerProcess) -> None:
    """Play those that a broker alone can answer."""
    found = fences("docs/migration.md", "console")
    assert found
    for fence in found:
        play_in_shell(fence, broker)
