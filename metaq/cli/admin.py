"""``metaq offset`` and ``stats``: a broker's positions and statistics over the text protocol."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import click

from metaq.address import Address
from metaq.cli.common import (
    FAILED,
    broker_option,
    connect_text,
    examples,
    json_option,
    no_topic,
    partition_option,
    print_json,
)
from metaq.cli.numbers import IntRange
from metaq.client import TextClient, parse_stats
from metaq.errors import ConfigError, Refused
from metaq.protocol.text.commands import END_OF_LOG
from metaq.protocol.text.replies import FORBIDDEN, NOT_FOUND
from metaq.suggestions import did_you_mean

TOPICS: Final = "topics"
CONFIG: Final = "config"
_TABLES: Final = (TOPICS, "offsets")
_ITEMS: Final = (*_TABLES, "realtime", CONFIG, "stacks", "help", "reset")
_UNKNOWN: Final = "1"
"""The ``resultCode`` of a topic that does not exist."""


def partitions_by_topic(client: TextClient) -> Mapping[str, int]:
    """Return the number of partitions of each topic. ``Refused`` to users who may not ask."""
    try:
        sections = parse_config(client.stats(CONFIG))
    except Refused as error:
        if error.code == FORBIDDEN:
            error.add_note("log in with --user, or name one partition with --partition")
        raise
    prefix = "topic="
    return {
        name.removeprefix(prefix): settings["numPartitions"] for name, settings in sections.items() if name.startswith(prefix)
    }


class Missing(NamedTuple):
    """A topic that does not exist, or a partition that an existing one does not have."""

    topic: bool
    """True when it is the topic that does not exist."""
    text: str
    """The words for it, and for what to do."""


def find_missing(client: TextClient, topic: str, partition: int | None = None) -> Missing | None:
    """Return what is not there.

    It is ``None`` when the topic exists, and has the partition if one is named, and for users who may not ask.
    """
    try:
        counts = partitions_by_topic(client)
    except Refused as error:
        if error.code != FORBIDDEN:
            raise
        return None
    if topic not in counts:
        return Missing(True, no_topic(topic, counts))
    count = counts[topic]
    if partition is not None and partition >= count:
        there = "only partition 0" if count == 1 else f"partitions 0 to {count - 1}"
        return Missing(False, f"{topic} has no partition {partition}; it has {there}")
    return None


@click.command(epilog=examples("metaq offset orders", "metaq offset orders --partition 2 --position 4096 --json"))
@click.argument("topic")
@partition_option(0, "Partition to ask about.")
@click.option("--position", type=IntRange(0), metavar="N", help="Print the valid position nearest to N instead.")
@broker_option
@json_option
def offset(topic: str, partition: int, position: int | None, broker: Address, as_json: bool) -> int:
    """Print TOPIC's oldest position and its end.

    The end is where the next message will begin.
    """
    asked = {"oldest": 0, "end": END_OF_LOG} if position is None else {"nearest": position}
    with connect_text(broker) as client:
        try:
            found = {name: client.offset(topic, wanted, partition=partition) for name, wanted in asked.items()}
        except Refused as error:
            if error.code != NOT_FOUND:
                raise
            absent = find_missing(client, topic, partition)
            click.echo(f"metaq: {absent.text if absent else f'there was never a message in {topic}-{partition}'}", err=True)
            return FAILED
    if as_json:
        print_json({"topic": topic, "partition": partition, **found})
    else:
        for name, answer in found.items():
            click.echo(f"{name} {answer}")
    return 0


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
    """Parse ``stats config`` into its sections, with numbers, truths and texts. ``ConfigError`` for a registry's."""
    return {name: {key: _scalar(value) for key, value in section.items()} for name, section in config_texts(text).items()}


def config_texts(text: str) -> dict[str, dict[str, str]]:
    """Parse ``stats config``, which has the form of an INI file, into its sections. ``ConfigError`` for a registry's."""
    import configparser  # noqa: PLC0415 - put asks for no configuration

    parser = configparser.RawConfigParser(delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their capitals, as configparser documents
    try:
        parser.read_string(text)
    except configparser.Error as error:
        advice = "give the address of a broker, by default port 8123"
        raise ConfigError(f"--broker: that is a registry, which stores no messages; {advice}") from error
    return {name: dict(parser.items(name)) for name in parser.sections()}


def _scalar(text: str) -> int | bool | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.removeprefix("-").isdecimal() else text


@click.command(epilog=examples("metaq stats", "metaq stats orders", "metaq stats topics --json"))
@click.argument("item", default="")
@broker_option
@json_option
def stats(item: str, broker: Address, as_json: bool) -> int:
    """Print statistics of the broker.

    ITEM is a topic, or one of: topics, offsets, realtime, config, stacks, help. As text they are the broker's own lines.
    """
    with connect_text(broker) as client:
        text = client.stats(item)
        is_topic = item not in ("", *_ITEMS)
        if is_topic and parse_stats(text).get("resultCode") == _UNKNOWN:
            advice = did_you_mean(item, (*_ITEMS, *partitions_by_topic(client)))
            click.echo(f"metaq: there is no topic {item}, nor one of {', '.join(_ITEMS)}{advice}", err=True)
            return FAILED
    if as_json:
        print_json(structured(item, text))
    else:
        click.echo("\n".join(line for line in text.splitlines() if line not in ("STATS", "END")))
    return 0
