"""``metaq put``, ``get`` and ``tail``: messages in and out, as lines.

A line becomes the body of one message, byte for byte and without the newline (byte 0A) that ends it; ``get`` writes each
body and a newline. So lines come back as they were, and when the last one had no newline, with ``--no-final-newline``.
"""

import base64
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from heapq import merge
from itertools import chain, islice, repeat
from operator import itemgetter
from typing import Any, BinaryIO, Final

import click

from metaq.address import Address
from metaq.cli.admin import find_missing, partitions_by_topic
from metaq.cli.common import (
    FAILED,
    REFUSED,
    Decorated,
    broker_option,
    connect_text,
    examples,
    json_line,
    json_option,
    partition_option,
    print_json,
)
from metaq.cli.messages.partitions import (
    Numbered,
    TopicFollower,
    in_portions,
    in_store_order,
    placed,
)
from metaq.cli.numbers import IntRange
from metaq.cli.progress import progress
from metaq.cli.times import later_options
from metaq.client import PutManyFailed, TextClient
from metaq.client.text.textclient import DEFAULT_MAX_BYTES
from metaq.errors import ClientError, ConnectionFailed, Refused, RequestTimeout
from metaq.message import Message, PutResult, TextPosition
from metaq.protocol.text.commands import BROKER_CHOOSES, END_OF_LOG
from metaq.protocol.text.replies import IN_DOUBT, NOT_FOUND, STORED_AT

_LINES_AT_ONCE: Final = 10_000
"""Between two calls of put_many no request is in flight; this many lines keep that pause, and the list of results, small."""

_IS: Final = "is"
_IS_LESS_SAFE: Final = "is, but not yet as safe as configured"
_IS_NOT: Final = "is not"
_MAY_BE: Final = "may be"

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


def _fate(result: PutResult | ClientError) -> str:
    """Return the words that complete "line N … stored" for the outcome of its put."""
    if isinstance(result, PutResult):
        return _IS
    if isinstance(result, ConnectionFailed | RequestTimeout):
        return _MAY_BE
    if isinstance(result, Refused):
        if result.text.startswith(STORED_AT):
            return _IS_LESS_SAFE
        if IN_DOUBT in result.text:
            return _MAY_BE
    return _IS_NOT


def lines_failed(before: int, error: PutManyFailed) -> ClientError:
    """Return the error that ended ``put --lines``, with what is known of each line; ``before`` lines are from calls before."""
    stored = before + error.first_failed
    later = [_fate(result) for result in error.results[error.first_failed + 1 :]]
    known = f"lines 1 to {stored} are stored, " if stored else ""
    failed = f"line {stored + 1} {_fate(error.reason)}"
    if _MAY_BE in later:
        rest = "later ones may be"
    else:
        less_safe = later.count(_IS_LESS_SAFE)
        count = later.count(_IS) + less_safe
        rest = f"{count or 'none'} after it {'are' if count > 1 else 'is'}"
        rest += f", {less_safe} not yet as safe as configured" if less_safe else ""
    error.reason.add_note(f"{known}{failed}, {rest}")
    return error.reason


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
            raise lines_failed(stored, error) from error
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
    if delay is not None and at is not None:
        raise click.UsageError("give either --delay or --at")
    with connect_text(broker) as client:
        if lines_file is not None:
            put_file(client, topic, lines_file, partition, attribute, as_json=as_json)
            return 0
        assert body is not None
        try:
            sent = client.put(topic, os.fsencode(body), partition=partition, attribute=attribute, delay=delay, deliver_at=at)
        except Refused:
            absent = None if partition == BROKER_CHOOSES else find_missing(client, topic, partition)
            if absent is None:
                raise
            click.echo(f"metaq: {absent.text}", err=True)
            return REFUSED
    if as_json:
        print_json({"topic": topic, **{name: value for name, value in sent._asdict().items() if value is not None}})
    elif sent.handle is None:
        click.echo(f"stored in {topic}-{sent.partition} at {sent.position}, id {sent.id}")
    else:
        click.echo(f"stored for {topic}-{sent.partition} for later, id {sent.id}, handle {sent.handle}")
    return 0


def put_file(client: TextClient, topic: str, file: BinaryIO, partition: int, attribute: str | None, *, as_json: bool) -> None:
    """Store each line of a file, and print where they are."""
    lines, size = Lines(file), size_of(file)
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


class Writer:
    """A writer of messages to standard output: bodies as lines, or JSON."""

    def __init__(self, *, as_json: bool, final_newline: bool = True) -> None:
        self._out = sys.stdout.buffer
        self._as_json = as_json
        self._final_newline = final_newline
        self._line_is_open = False

    def write(self, messages: Sequence[Numbered]) -> None:
        """Write whole lines, and flush them to the reader."""
        if not messages:
            return
        if self._as_json:
            parts = [json_line({**describe(message), "partition": partition}) for partition, message in messages]
        else:
            parts = [b"\n"] if self._line_is_open else []
            parts.append(b"\n".join(message.body for _, message in messages))
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


def read_option(command: Decorated) -> Decorated:
    """Add ``--partition`` of commands that read all partitions without it."""
    text = "Read this partition only.  [default: all, in the order in which messages were stored]"
    return click.option("--partition", type=IntRange(0), metavar="N", help=text)(command)


@click.command(
    epilog=examples("metaq get orders", "metaq get orders --count 10 --json", "metaq get orders --partition 2 --position 4096")
)
@click.argument("topic")
@read_option
@click.option(
    "--position",
    type=IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Where to begin in the partition; 0 is the oldest message.",
)
@click.option("--count", type=IntRange(1), metavar="N", help="The most messages to get.  [default: all]")
@click.option(
    "--max-bytes",
    type=IntRange(1),
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
    partition: int | None,
    position: int,
    count: int | None,
    max_bytes: int,
    no_final_newline: bool,
    broker: Address,
    as_json: bool,
) -> int:
    """Print TOPIC's messages, from the oldest to the end.

    Bodies are printed as they are, each followed by a newline. The messages of all partitions come in the order in which they
    were stored; those of a transaction follow the one before them in their partition.
    """
    writer = Writer(as_json=as_json, final_newline=not no_final_newline)
    found = 0
    with connect_text(broker) as client, progress("reading", "messages", prints=True) as bar:
        partitions = [partition] if partition is not None else range(partitions_by_topic(client).get(topic, 1))
        if position and len(partitions) > 1:
            raise click.UsageError(f"{topic} has {len(partitions)} partitions: say with --partition of which --position is")
        positions = {number: TextPosition(position) for number in partitions}
        for portion in in_portions(islice(in_store_order(client, topic, positions, max_bytes), count)):
            writer.write(portion)
            found += len(portion)
            bar.reach(found, found / count if count else None)
        absent = None if found else find_missing(client, topic, partition)
    if not found:
        click.echo(f"metaq: {absent.text if absent else nothing_in(topic, partition, position)}", err=True)
        return FAILED
    return 0


def nothing_in(topic: str, partition: int | None, position: int = 0) -> str:
    """Return the words for a place in which there is no message."""
    where = topic if partition is None else f"{topic}-{partition}"
    if not position:
        return f"nothing in {where}"
    return f"nothing in {where} from {position} on; metaq offset {topic}{_option(partition)} shows where it begins and ends"


def _option(partition: int | None) -> str:
    return f" --partition {partition}" if partition else ""


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


def newest_of(
    client: TextClient, topic: str, partitions: Iterable[int], count: int
) -> tuple[list[Numbered], dict[int, TextPosition]]:
    """Return the newest ``count`` messages of all these partitions in their order, and the position after each partition."""
    newest: list[tuple[int, Numbered]] = []
    after: dict[int, TextPosition] = {}
    for partition in partitions:
        messages, after[partition] = last_messages(client, topic, partition, count)
        found = placed(Numbered(partition, message) for message in messages)
        newest = list(merge(newest, found, key=itemgetter(0)))[-count:] if count else []
    return [numbered for _, numbered in newest], after


@click.command(epilog=examples("metaq tail orders", "metaq tail orders -f", "metaq tail orders -n 1 --partition 2 --json"))
@click.argument("topic")
@click.option("-f", "--follow", is_flag=True, help="Continue with new messages until interrupted.")
@click.option(
    "-n",
    "--count",
    type=IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="Number of the newest messages to begin with.",
)
@read_option
@broker_option
@json_option
def tail(topic: str, follow: bool, count: int, partition: int | None, broker: Address, as_json: bool) -> int:
    """Print TOPIC's newest messages, or follow it.

    Bodies are printed as they are, each followed by a newline. With -f it waits for a topic that does not exist, and for a
    broker that is restarted, and continues where it was.
    """
    writer = Writer(as_json=as_json)
    with connect_text(broker) as client:
        partitions = [partition] if partition is not None else range(partitions_by_topic(client).get(topic, 1))
        messages, positions = newest_of(client, topic, partitions, count)
        writer.write(messages)
        absent = None if messages else find_missing(client, topic, partition)
        if follow and (absent is None or absent.topic):
            if absent is not None:
                click.echo(f"metaq: {absent.text}; waiting for it", err=True)
                positions = {} if partition is None else positions  # nobody knows how many partitions it will have
            TopicFollower(client, topic, partition, positions, writer.write).run()
    if messages or (absent is None and not count):
        return 0
    click.echo(f"metaq: {absent.text if absent else nothing_in(topic, partition)}", err=True)
    return FAILED
