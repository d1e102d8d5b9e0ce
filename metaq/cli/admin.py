"""``metaq offset``, ``stats`` and ``topic``: looking at a broker."""

from typing import Any, Final

import click

from metaq.cli.common import broker_option, connect, json_option, partition_option, print_json
from metaq.client import parse_stats
from metaq.protocol.commands import END_OF_LOG

TOPICS: Final = "topics"
_TABLES: Final = (TOPICS, "offsets")


@click.command()
@click.argument("topic")
@partition_option(0, "Partition to ask about.")
@click.option("--position", type=click.IntRange(0), metavar="N", help="Print the valid position nearest to N instead.")
@broker_option
@json_option
def offset(topic: str, partition: int, position: int | None, broker: tuple[str, int], as_json: bool) -> None:
    """Print where TOPIC's oldest message begins and where its next one will."""
    asked = {"oldest": 0, "end": END_OF_LOG} if position is None else {"nearest": position}
    with connect(broker) as client:
        found = {name: client.offset(topic, wanted, partition=partition) for name, wanted in asked.items()}
    if as_json:
        print_json({"topic": topic, "partition": partition, **found})
    else:
        for name, answer in found.items():
            click.echo(f"{name} {answer}")


def structured(item: str, text: str) -> dict[str, Any]:
    """A statistics text for JSON: numbers as such; a topic or a partition is a table of its own."""
    values = parse_stats(text)
    if item not in _TABLES:
        return {name: _scalar(value) for name, value in values.items()}
    rows = {}
    for name, value in values.items():
        tokens = value.split(" ")
        rows[name] = dict(zip(tokens[::2], map(_scalar, tokens[1::2]), strict=False))  # a topic without data: *Empty*
    return rows


def _scalar(text: str) -> int | bool | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.removeprefix("-").isdecimal() else text


@click.command()
@click.argument("item", default="")
@broker_option
@json_option
def stats(item: str, broker: tuple[str, int], as_json: bool) -> None:
    """Print statistics of the broker, of a topic, or of ITEM: topics, offsets, realtime, config, help.

    As text they are the broker's own lines.
    """
    with connect(broker) as client:
        text = client.stats(item)
    if as_json:
        print_json(structured(item, text))
    else:
        click.echo("\n".join(line for line in text.splitlines() if line not in ("STATS", "END")))


@click.group()
def topic() -> None:
    """List topics, or create one."""


@topic.command("list")
@broker_option
@json_option
def list_topics(broker: tuple[str, int], as_json: bool) -> None:
    """Print the topics and what is in them."""
    with connect(broker) as client:
        text = client.stats(TOPICS)
    if as_json:
        print_json([{"topic": name, **row} for name, row in structured(TOPICS, text).items()])
    else:
        for name, row in parse_stats(text).items():
            click.echo(f"{name} {row}")


@topic.command()
@click.argument("topic")
@click.argument("partitions", type=click.IntRange(1), default=1)
@broker_option
@json_option
def create(topic: str, partitions: int, broker: tuple[str, int], as_json: bool) -> None:
    """Create TOPIC with PARTITIONS partitions (1 by default), or give it more; it never gets fewer."""
    with connect(broker) as client:
        now = client.create(topic, partitions)
    if as_json:
        print_json({"topic": topic, "partitions": now})
    else:
        click.echo(f"{topic} has {now} partition{'s' if now > 1 else ''}")
