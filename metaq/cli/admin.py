"""``metaq offset`` and ``stats``: a broker's positions and statistics over the text protocol."""

import configparser
from typing import Any, Final

import click

from metaq.address import Address
from metaq.cli.common import broker_option, connect_text, examples, json_option, partition_option, print_json
from metaq.client import parse_stats
from metaq.protocol.text.commands import END_OF_LOG

TOPICS: Final = "topics"
CONFIG: Final = "config"
_TABLES: Final = (TOPICS, "offsets")


@click.command(epilog=examples("metaq offset orders", "metaq offset orders --partition 2 --position 4096 --json"))
@click.argument("topic")
@partition_option(0, "Partition to ask about.")
@click.option("--position", type=click.IntRange(0), metavar="N", help="Print the valid position nearest to N instead.")
@broker_option
@json_option
def offset(topic: str, partition: int, position: int | None, broker: Address, as_json: bool) -> None:
    """Print TOPIC's oldest position and its end.

    The end is where the next message will begin.
    """
    asked = {"oldest": 0, "end": END_OF_LOG} if position is None else {"nearest": position}
    with connect_text(broker) as client:
        found = {name: client.offset(topic, wanted, partition=partition) for name, wanted in asked.items()}
    if as_json:
        print_json({"topic": topic, "partition": partition, **found})
    else:
        for name, answer in found.items():
            click.echo(f"{name} {answer}")


def structured(item: str, text: str) -> dict[str, Any]:
    """Return a statistics text as JSON: numbers as such; each topic, partition or section of settings as a table of its own."""
    if item == CONFIG:
        return parse_config(text)
    values = parse_stats(text)
    if item not in _TABLES:
        return {name: _scalar(value) for name, value in values.items()}
    rows = {}
    for name, value in values.items():
        tokens = value.split(" ")
        rows[name] = dict(zip(tokens[::2], map(_scalar, tokens[1::2]), strict=False))  # a topic without data: *Empty*
    return rows


def parse_config(text: str) -> dict[str, Any]:
    """Parse ``stats config``, which has the form of an INI file, into its sections."""
    parser = configparser.RawConfigParser(delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their capitals, as configparser documents
    parser.read_string(text)
    return {name: {key: _scalar(value) for key, value in parser.items(name)} for name in parser.sections()}


def _scalar(text: str) -> int | bool | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.removeprefix("-").isdecimal() else text


@click.command(epilog=examples("metaq stats", "metaq stats orders", "metaq stats topics --json"))
@click.argument("item", default="")
@broker_option
@json_option
def stats(item: str, broker: Address, as_json: bool) -> None:
    """Print statistics of the broker.

    ITEM is a topic, or one of: topics, offsets, realtime, config, stacks, help. As text they are the broker's own lines.
    """
    with connect_text(broker) as client:
        text = client.stats(item)
    if as_json:
        print_json(structured(item, text))
    else:
        click.echo("\n".join(line for line in text.splitlines() if line not in ("STATS", "END")))
