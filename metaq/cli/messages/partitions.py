"""All partitions of a topic of one broker, read as one stream in the order in which their messages were stored."""

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

import click

from metaq.cli.admin import partitions_by_topic
from metaq.client import TextClient
from metaq.client.text.textclient import DEFAULT_MAX_BYTES
from metaq.errors import ConnectionFailed, Refused, RequestTimeout
from metaq.message import Message, TextPosition
from metaq.protocol.text.replies import UNAVAILABLE

_LEAST_BYTES: Final = 16 * 1024
"""What is asked for of one partition at least: with 1024 partitions, 16 MiB at a time in all."""
_AT_ONCE: Final = 1000
_HOLD_MS: Final = 10_000
_LOOKS_S: Final = 0.1
_LOOKS_PER_PARTITION_S: Final = 0.002
"""The pause between two looks at several partitions: ten looks a second, and never more than 500 gets."""
_FOR_TOPIC_S: Final = 0.5
_COUNT_S: Final = 5.0
"""The time after which the partitions are counted again: a topic can get more while it is followed."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0


class Numbered(NamedTuple):
    """A message, and the partition that it is in."""

    partition: int
    message: Message


def in_store_order(client: TextClient, topic: str, positions: Mapping[int, TextPosition], max_bytes: int) -> Iterator[Numbered]:
    """Yield the messages of partitions from their positions to their ends, in the order of their ids.

    Ids grow as messages are stored. Those of transactions do not, so such a message follows its predecessor in the partition.
    At most ``max_bytes``, or 16 KiB for each partition, are in memory at a time.
    """
    share = max(_LEAST_BYTES, max_bytes // max(1, len(positions)))
    streams = (_placed(client, topic, partition, at, share) for partition, at in sorted(positions.items()))
    return (numbered for _, numbered in heapq.merge(*streams, key=itemgetter(0)))


def _placed(
    client: TextClient, topic: str, partition: int, position: TextPosition, max_bytes: int
) -> Iterator[tuple[int, Numbered]]:
    messages = client.iterate(topic, partition=partition, position=position, max_bytes=max_bytes)
    return placed(Numbered(partition, message) for message in messages)


def placed(messages: Iterator[Numbered]) -> Iterator[tuple[int, Numbered]]:
    """Yield messages of one partition with numbers that sort them among those of others."""
    place = -1
    for numbered in messages:
        place = max(place, numbered.message.id)
        yield place, numbered


def in_portions(messages: Iterator[Numbered]) -> Iterator[list[Numbered]]:
    """Yield messages in lists of up to a thousand, and of about a megabyte at most."""
    portion: list[Numbered] = []
    size = 0
    for numbered in messages:
        portion.append(numbered)
        size += len(numbered.message.body)
        if len(portion) == _AT_ONCE or size >= DEFAULT_MAX_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


class TopicFollower:
    """A reader of partitions that goes on when the broker is back after a restart, where it was."""

    def __init__(
        self,
        client: TextClient,
        topic: str,
        partition: int | None,
        positions: dict[int, TextPosition],
        write: Callable[[Sequence[Numbered]], None],
    ) -> None:
        """Take the positions to continue at, and a function that writes messages; partitions that come later begin at 0."""
        self._client = client
        self._write = write
        self._topic = topic
        self._partition = partition
        self._positions = positions
        self._counted = 0.0

    def run(self) -> None:
        """Write messages as they come, each once, until the process is interrupted."""
        lost_at, pause = 0.0, _FIRST_PAUSE_S
        while True:
            try:
                self._count()
                self._look(hold=not lost_at)
            except (ConnectionFailed, RequestTimeout, Refused) as error:
                if isinstance(error, Refused) and error.code != UNAVAILABLE:
                    raise
                if not lost_at:
                    lost_at = time.monotonic()
                    click.echo(f"metaq: {error}; waiting until the broker is back", err=True)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            if lost_at:
                click.echo(f"metaq: the broker is back after {time.monotonic() - lost_at:.1f} s", err=True)
                lost_at, pause = 0.0, _FIRST_PAUSE_S

    def _count(self) -> None:
        if self._partition is not None or time.monotonic() < self._counted + (_COUNT_S if self._positions else 0.0):
            return
        for number in range(partitions_by_topic(self._client).get(self._topic, 0)):
            self._positions.setdefault(number, TextPosition(0))
        self._counted = time.monotonic()

    def _look(self, *, hold: bool) -> None:
        """Write what there is, or wait: for a single partition the broker holds the question until there is something."""
        asked = time.monotonic()
        if len(self._positions) == 1:
            pause, found = _LOOKS_S, self._ask_one(_HOLD_MS if hold else 0)
        else:
            pause = max(_LOOKS_S, len(self._positions) * _LOOKS_PER_PARTITION_S) if self._positions else _FOR_TOPIC_S
            found = False
            for portion in in_portions(in_store_order(self._client, self._topic, self._positions, DEFAULT_MAX_BYTES)):
                self._write(portion)
                self._positions |= {one.partition: one.message.next_position for one in portion}
                found = True
        if not found:
            time.sleep(max(0.0, asked + pause - time.monotonic()))

    def _ask_one(self, wait_ms: int) -> bool:
        ((partition, at),) = self._positions.items()
        batch = self._client.get(self._topic, at, partition=partition, max_bytes=DEFAULT_MAX_BYTES, wait_ms=wait_ms)
        self._write([Numbered(partition, message) for message in batch.messages])
        self._positions[partition] = batch.next_position
        return batch.next_position != at
