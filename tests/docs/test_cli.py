"""The document about the command line: its examples are right, and it leaves nothing out."""

from collections.abc import Iterator

import click
import pytest

from metaq.cli import commands
from tests.docs.examples import ROOT, fences
from tests.docs.test_readme import play_in_shell
from tests.support.broker import BrokerProcess

DOCUMENT = "docs/cli.md"
BY_REGISTRY = ("topic", "message", "timer", "group", "dlq", "tx", "offsets", "cluster", "doctor", "why-not-consuming")


def leaves() -> Iterator[tuple[str, click.Command]]:
    """Every command by way of the registry, as it is typed."""
    context = click.Context(commands)
    for name in BY_REGISTRY:
        command = commands.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"metaq {name} {one}", leaf) for one, leaf in command.commands.items())
        else:
            yield f"metaq {name}", command


@pytest.mark.slow
def test_examples(broker: BrokerProcess) -> None:
    """E-04: one after the other against one broker, each line as it stands there."""
    found = fences(DOCUMENT, "console")
    assert len(found) >= 5
    for fence in found:
        play_in_shell(fence, broker)


@pytest.mark.parametrize(("typed", "command"), list(leaves()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_is_described(typed: str, command: click.Command) -> None:
    """E-04: in the document; and its help says what it does, and shows examples of itself."""
    assert f"`{typed}" in (ROOT / DOCUMENT).read_text("utf-8")
    assert command.help and command.epilog is not None
    examples = [line.strip() for line in command.epilog.splitlines()[2:]]
    # one command has a short name, too
    assert examples and all(line.startswith((typed, f"metaq {command.name} ")) for line in examples)
    assert {"--registry", "--json"} <= {name for parameter in command.params for name in parameter.opts}
