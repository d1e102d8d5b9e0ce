"""``metaq bench``: a quick measurement of how fast a broker takes and delivers messages."""

import time
from itertools import repeat
from typing import Final, NamedTuple

import click

from metaq.address import Address
from metaq.cli.common import broker_option, connect_text, examples, json_option, print_json
from metaq.cli.numbers import IntRange
from metaq.client import TextClient

_MESSAGES_AT_ONCE: Final = 10_000


class Throughput(NamedTuple):
    """A number of messages and the seconds that they took."""

    messages: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        per_second, mb_per_second = self.messages / self.seconds, self.bytes / self.seconds / 1e6
        return f"{per_second:,.0f} messages/s, {mb_per_second:,.1f} MB/s ({self.messages:,} in {self.seconds:.2f} s)"


def measure_put(client: TextClient, topic: str, messages: int, size: int) -> tuple[Throughput, int, int]:
    """Store messages of ``size`` bytes in one partition. Return the rate, the partition, and the position where they begin."""
    body = bytes(size)
    first = client.put(topic, body)
    started = time.perf_counter()
    for at in range(0, messages, _MESSAGES_AT_ONCE):
        client.put_many(topic, repeat(body, min(_MESSAGES_AT_ONCE, messages - at)), partition=first.partition)
    return Throughput(messages, messages * size, time.perf_counter() - started), first.partition, first.position


def measure_get(client: TextClient, topic: str, partition: int, position: int, messages: int) -> Throughput:
    """Read this many messages from a position on. Return the rate."""
    count = size = 0
    started = time.perf_counter()
    for batch in client.batches(topic, partition=partition, position=position):
        count += len(batch.messages)
        size += sum(len(message.body) for message in batch.messages)
        if count >= messages:
            break
    return Throughput(count, size, time.perf_counter() - started)


@click.command(epilog=examples("metaq bench", "metaq bench --messages 1000000 --size 1024 --json"))
@click.option(
    "--topic", default="metaq-bench", show_default=True, metavar="TOPIC", help="The topic to use; the messages stay in it."
)
@click.option(
    "--messages",
    type=IntRange(1, 10_000_000),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Message count.",
)
@click.option("--size", type=IntRange(0), default=128, show_default=True, metavar="BYTES", help="Size of each body.")
@broker_option
@json_option
def bench(topic: str, messages: int, size: int, broker: Address, as_json: bool) -> None:
    """Put and get messages, and print the rates.

    Over one connection, with many puts in flight at once: the rates are those of this client as much as of the broker.
    """
    with connect_text(broker) as client:
        put, partition, position = measure_put(client, topic, messages, size)
        got = measure_get(client, topic, partition, position, messages)
    if as_json:
        print_json({"topic": topic, "size": size, "put": put._asdict(), "get": got._asdict()})
    else:
        click.echo(f"put {put}\nget {got}")
