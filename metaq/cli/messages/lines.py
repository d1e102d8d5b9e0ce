"""``metaq put``, ``get`` and ``tail``: messages in and out, as lines.

A line becomes the body of one message, byte for byte and without the newline (byte 0A) that ends it; ``get`` writes each
body and a newline. So lines come back as they were, and when the last one had no newline, with ``--no-final-newline``.
"""

import base64
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from itertools import chain, islice, repeat
from typing import Any, BinaryIO, Final

import click

from metaq.address import Address
from metaq.cli.common import (
    FAILED,
    broker_option,
    connect_text,
    examples,
    json_line,
    json_option,
    partition_option,
    print_json,
)
from metaq.cli.progress import progress
from metaq.cli.times import later_options
from metaq.client import PutManyFailed, TextClient
from metaq.client.text.textclient import DEFAULT_MAX_BYTES
from metaq.errors import Refused
from metaq.message import Message, PutResult, TextPosition
from metaq.protocol.text.commands import BROKER_CHOOSES, END_OF_LOG
from metaq.protocol.text.replies import NOT_FOUND

_LINES_AT_ONCE: Final = 10_000
"""Between two calls of put_many no request is in flight; this many lines keep that pause, and the list of results, small."""

_REACH_BYTES: Final = 64 * 1024
_REACH_GROWTH: Final = 8


class Lines:
    """The lines of a binary stream without their newlines, counted."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = stream
        self.count = 0
        self.bytes = 0
        self.ends_with_newline = True

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            body = line.removesuffix(b"\n")
            self.count += 1
            self.bytes += len(body)
            self.ends_with_newline = len(body) < len(line)
            yield body

    def share(self, size: int | None) -> float | None:
        """Return which share of a stream of this size has been read; ``None`` when the size is not known."""
        return min(1.0, (self.bytes + self.count) / size) if size else None


def size_of(stream: BinaryIO) -> int | None:
    """Return the size of a file; ``None`` for a pipe or a terminal, whose end nobody knows."""
    try:
        found = os.fstat(stream.fileno())
    except OSError:  # no file of the system's
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def put_lines(
    client: TextClient, topic: str, lines: Lines, partition: int, attribute: str | None, tell: Callable[[int], None]
) -> PutResult | None:
    """Store the lines in order, all in one partition. Return where the first one is; ``None`` when there are none.

    ``tell`` is called with the number of lines that are stored, again and again.
    """
    bodies = iter(lines)
    first: PutResult | None = None
    stored = 0
    # The first goes alone: the others go to the partition that the broker chose for it.
    for count in chain([1], repeat(_LINES_AT_ONCE)):
        try:
            results = client.put_many(topic, islice(bodies, count), partition=partition, attribute=attribute)
        except PutManyFailed as error:
            click.echo(f"metaq: lines 1 to {stored + error.first_failed} are stored, later ones may be", err=True)
            raise
        if not results:
            break
        stored += len(results)
        tell(stored)
        first = first or results[0]
        partition = first.partition
    return first


@click.command(
    epilog=examples(
        "metaq put orders 'paid 2003'",
        "metaq put orders --lines orders.txt --partition 2",
        "metaq put reminders 'call back' --delay 90m",
    )
)
@click.argument("topic")
@click.argument("body", required=False)
@click.option(
    "lines_file", "--lines", type=click.File("rb"), metavar="FILE", help="Store each line of FILE; - is standard input."
)
@partition_option(BROKER_CHOOSES, "Partition; with -1 the broker chooses one, the same for all lines.")
@click.option("--attribute", metavar="TEXT", help="Attribute of each message.")
@later_options
@broker_option
@json_option
def put(
    topic: str,
    body: str | None,
    lines_file: BinaryIO | None,
    partition: int,
    attribute: str | None,
    delay: timedelta | None,
    at: datetime | None,
    broker: Address,
    as_json: bool,
) -> int:
    """Store BODY in TOPIC, or each line of a file.

    Prints where the message is when it is stored. Each line becomes one message, without its newline; all go to one
    partition.
    """
    if (body is None) == (lines_file is None):
        raise click.UsageError("give either BODY or --lines FILE")
    if lines_file is not None and (delay is not None or at is not None):
        raise click.UsageError("lines cannot be delayed: leave out --delay and --at, or give BODY")
    with connect_text(broker) as client:
        if lines_file is None:
            assert body is not None
            sent = client.put(topic, os.fsencode(body), partition=partition, attribute=attribute, delay=delay, deliver_at=at)
            if as_json:
                print_json({"topic": topic, **{name: value for name, value in sent._asdict().items() if value is not None}})
            elif sent.handle is None:
                click.echo(f"stored in {topic}-{sent.partition} at {sent.position}, id {sent.id}")
            else:
                click.echo(f"stored for {topic}-{sent.partition} for later, id {sent.id}, handle {sent.handle}")
            return 0
        lines = Lines(lines_file)
        size = size_of(lines_file)
        with progress("storing", "lines") as bar:
            first = put_lines(client, topic, lines, partition, attribute, lambda stored: bar.reach(stored, lines.share(size)))
    if not lines.ends_with_newline:
        click.echo("metaq: the last line has no newline; get --no-final-newline prints it the same way", err=True)
    if as_json:
        place = {} if first is None else {"partition": first.partition, "position": first.position}
        print_json({"topic": topic, "messages": lines.count, "bytes": lines.bytes, **place})
    elif first is None:
        click.echo("nothing was stored: there are no lines")
    else:
        click.echo(f"stored {lines.count} messages in {topic}-{first.partition} from {first.position} on")
    return 0


class Writer:
    """A writer of messages to standard output: bodies as lines, or JSON."""

    def __init__(self, *, as_json: bool, final_newline: bool = True) -> None:
        self._out = sys.stdout.buffer
        self._as_json = as_json
        self._final_newline = final_newline
        self._line_is_open = False

    def write(self, messages: Iterable[Message]) -> None:
        """Write whole lines, and flush them to the reader."""
        if self._as_json:
            parts = [json_line(describe(message)) for message in messages]
        else:
            parts = [b"\n"] if self._line_is_open else []
            parts.append(b"\n".join(message.body for message in messages))
            if self._final_newline:
                parts.append(b"\n")
            self._line_is_open = not self._final_newline
        self._out.write(b"".join(parts))
        self._out.flush()


def describe(message: Message) -> dict[str, Any]:
    """Return a message as JSON: the body as text, or in base64 when it is not UTF-8."""
    fields: dict[str, Any] = message._asdict()
    if (error := fields.pop("error")) is not None:
        fields["error"] = str(error)
    del fields["body"]
    return fields | body_fields(message.body)


def body_fields(body: bytes) -> dict[str, str]:
    """Return a body as members of JSON: ``body``, or ``body_base64`` when it is not UTF-8."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


@click.command(
    epilog=examples("metaq get orders", "metaq get orders --count 10 --json", "metaq get orders --partition 2 --position 4096")
)
@click.argument("topic")
@partition_option(0, "Partition to read.")
@click.option(
    "--position",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Where to begin; 0 is the oldest message.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="The most messages to get.  [default: all]")
@click.option(
    "--max-bytes",
    type=click.IntRange(1),
    default=DEFAULT_MAX_BYTES,
    show_default=True,
    metavar="N",
    help="Bytes to request at a time.",
)
@click.option("-n", "--no-final-newline", is_flag=True, help="Print no newline after the last body.")
@broker_option
@json_option
def get(
    topic: str,
    partition: int,
    position: int,
    count: int | None,
    max_bytes: int,
    no_final_newline: bool,
    broker: Address,
    as_json: bool,
) -> int:
    """Print TOPIC's messages from a position to the end.

    Bodies are printed as they are, each followed by a newline.
    """
    writer = Writer(as_json=as_json, final_newline=not no_final_newline)
    found = 0
    with connect_text(broker) as client, progress("reading", "messages", prints=True) as bar:
        for batch in client.batches(topic, partition=partition, position=position, max_bytes=max_bytes):
            messages = batch.messages[: None if count is None else count - found]
            writer.write(messages)
            found += len(messages)
            bar.reach(found, found / count if count else None)
            if found == count:
                break
    if not found:
        click.echo(f"metaq: nothing in {topic}-{partition} from {position} on", err=True)
        return FAILED
    return 0


def last_messages(client: TextClient, topic: str, partition: int, count: int) -> tuple[list[Message], TextPosition]:
    """Return the newest ``count`` messages, or all when there are fewer, and the position after them."""
    try:
        end = client.offset(topic, END_OF_LOG, partition=partition)
    except Refused as error:
        if error.code != NOT_FOUND:
            raise
        return [], TextPosition(0)
    oldest = client.offset(topic, 0, partition=partition)
    reach = _REACH_BYTES
    # The size of that many messages is unknown before they are read: look back further until there are enough.
    while count:
        start = client.offset(topic, max(oldest, end - reach), partition=partition)
        newest = deque(client.iterate(topic, partition=partition, position=start), maxlen=count)
        if newest and (len(newest) == count or start <= oldest):
            return list(newest), newest[-1].next_position
        if start <= oldest:
            break
        reach *= _REACH_GROWTH
    return [], end


@click.command(epilog=examples("metaq tail orders", "metaq tail orders -f", "metaq tail orders -n 1 --partition 2 --json"))
@click.argument("topic")
@click.option("-f", "--follow", is_flag=True, help="Continue with new messages until interrupted.")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="Number of the newest messages to begin with.",
)
@partition_option(0, "Partition to read.")
@broker_option
@json_option
def tail(topic: str, follow: bool, count: int, partition: int, broker: Address, as_json: bool) -> int:
    """Print TOPIC's newest messages, or follow it.

    Bodies are printed as they are, each followed by a newline.
    """
    writer = Writer(as_json=as_json)
    with connect_text(broker) as client:
        messages, position = last_messages(client, topic, partition, count)
        if messages:
            writer.write(messages)
        elif not follow:
            click.echo(f"metaq: nothing in {topic}-{partition}", err=True)
            return FAILED
        if follow:
            for batch in client.batches(topic, partition=partition, position=position, follow=True):
                writer.write(batch.messages)
    return 0
