"""``metaq message``: single messages of all brokers, which are found through the registry."""

import heapq
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, BinaryIO, Final

import click

from metaq.address import parse_address
from metaq.cli.common import FAILED, connect_registry, examples, json_line, json_option, print_json, registry_option
from metaq.cli.messages.lines import body_fields
from metaq.cli.numbers import IntRange
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import Row, local_time, one_line, print_record, print_rows
from metaq.cli.times import TIMES, When, later_options
from metaq.client import Admin, Client, PullConsumer, ReceivedMessage
from metaq.client.message import unix_ms
from metaq.diagnosis.tracks import track_of
from metaq.errors import BadRequest, MetaqError, RouteNotFound
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.properties import DELAY, KEYS, PRIORITY, SHARDING_KEY
from metaq.protocol.record import TAGS
from metaq.protocol.sql92 import compile_expression
from metaq.protocol.subscription import EVERYTHING, parse_subscription

Matches = Callable[[ReceivedMessage], bool]

DEFAULT_COUNT: Final = 32
FURTHEST_BACK: Final = 10_000
"""Messages of a partition, from its end back, that are searched for those with a tag."""
_GROWTH: Final = 8
_BODY_SHOWN: Final = 60
_WAIT_S: Final = 1.0
_COUNT_S: Final = 5.0
"""The time after which the partitions are counted again: a topic can get more while it is followed."""
_OPTIONS: Final = {KEYS: "--key", TAGS: "--tag", SHARDING_KEY: "--ordering-key", PRIORITY: "--priority", DELAY: "--delay-level"}


@click.group(cls=Suggesting)
def message() -> None:
    """Send messages, and find them by key, id, time or tag."""


# -- how messages are shown -------------------------------------------------------------------------------------------


def describe(found: ReceivedMessage) -> dict[str, Any]:
    """Return a message as JSON: the body as text, or in base64 when it is not UTF-8."""
    row: dict[str, Any] = {
        "id": found.id,
        "topic": found.queue.topic,
        "broker": found.queue.broker_name,
        "partition": found.partition,
        "offset": found.queue_offset,
        "stored_ms": found.store_ms,
        "tag": found.tag,
        "keys": list(found.keys),
        "born_ms": found.born_ms,
        "reconsume_times": found.reconsume_times,
        "offset_id": found.offset_id,
        "properties": dict(found.properties),
    }
    if found.error is not None:
        row["error"] = str(found.error)
    return row | body_fields(found.body)


def print_messages(found: list[ReceivedMessage], *, as_json: bool) -> None:
    """Print messages, a line for each."""
    if as_json:
        for one in found:
            print_json(describe(one))
        return
    rows: list[Row] = [
        {
            "id": one.id,
            "broker": one.queue.broker_name,
            "partition": one.partition,
            "offset": one.queue_offset,
            "stored_ms": one.store_ms,
            "tag": one.tag,
            "keys": list(one.keys),
            "body": beginning(one.body),
        }
        for one in found
    ]
    print_rows(rows, as_json=False)


def beginning(body: bytes) -> str:
    """Return as much of a body as fits into a line."""
    text = body[: 4 * _BODY_SHOWN].decode(errors="replace")
    return one_line(text if len(text) <= _BODY_SHOWN else f"{text[:_BODY_SHOWN]}…")


def when_stored(one: ReceivedMessage) -> tuple[int, int]:
    """Return a sort key: many messages are stored in one millisecond, and within a broker the log has an order."""
    return one.store_ms, one.log_offset


def wanted(topic: str, tag: str | None, sql: str | None) -> Matches:
    """Return the filter for ``--tag`` or ``--sql``. ``SubscriptionInvalid``."""
    if tag is not None and sql is not None:
        raise click.UsageError("give either --tag or --sql")
    if sql is not None:
        matches = compile_expression(sql)
        return lambda found: matches(found.properties)
    subscription = parse_subscription(topic, tag or EVERYTHING)
    return lambda found: subscription.matches_tag(found.tag)


# -- send -------------------------------------------------------------------------------------------------------------


@message.command(
    epilog=examples(
        "metaq message send orders 'paid 2003' --tag paid --key order-2003",
        "metaq message send orders --file body.json --property region=eu",
        "metaq message send reminders 'call back' --delay 90m",
    )
)
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--file", type=click.File("rb"), metavar="FILE", help="Read the body from FILE; - is standard input.")
@click.option("--tag", metavar="TAG", help="The tag, by which consumers can filter.")
@click.option("--key", "keys", multiple=True, metavar="KEY", help="A key by which it can be found; may be repeated.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="A property; may be repeated.")
@click.option("--ordering-key", metavar="KEY", help="Messages with the same key go to the same partition.")
@click.option("--priority", type=IntRange(0), metavar="N", help="The greater the more urgent, in a topic with priorities.")
@click.option("--delay-level", type=IntRange(0, 18), default=0, metavar="N", help="Delay from 1 s (1) to 2 h (18).")
@later_options
@registry_option
@json_option
def send(
    topic: str,
    body: str | None,
    file: BinaryIO | None,
    tag: str | None,
    keys: tuple[str, ...],
    properties: tuple[str, ...],
    ordering_key: str | None,
    priority: int | None,
    delay_level: int,
    delay: timedelta | None,
    at: datetime | None,
    registry: str,
    as_json: bool,
) -> None:
    """Send BODY, or the content of a file, to TOPIC as one message.

    With --delay or --at, its handle is printed, which metaq timer cancel takes.
    """
    if (body is None) == (file is None):
        raise click.UsageError("give either BODY or --file FILE")
    if (delay is not None) + (at is not None) + (delay_level > 0) > 1:
        raise click.UsageError("give one of --delay, --at and --delay-level")
    content = file.read() if file is not None else (body or "").encode(errors="surrogateescape")
    pairs = dict(pair.partition("=")[::2] for pair in properties)
    if reserved := next((name for name in pairs if name in _OPTIONS), None):
        raise click.UsageError(f"--property {reserved} is set by an option of its own: {_OPTIONS[reserved]}")
    if wrong := next((pair for pair in properties if not all(pair.partition("="))), None):
        raise click.UsageError(f"--property {wrong!r} is not NAME=VALUE")
    with connect_registry(registry) as client:
        sent = client.producer().send(
            topic,
            content,
            tag=tag,
            keys=keys,
            properties=pairs,
            ordering_key=ordering_key,
            delay_level=delay_level,
            delay=delay,
            deliver_at=at,
            priority=priority,
        )
    queue = sent.queue
    if as_json:
        place = {"topic": topic, "broker": queue.broker_name, "partition": queue.partition, "offset": sent.queue_offset}
        handle = {} if sent.handle is None else {"handle": sent.handle}
        print_json({"id": sent.id, "offset_id": sent.offset_id, **place, "status": sent.status.name, **handle})
        return
    warning = "" if sent.status.value == 0 else f", {sent.status.name}"
    where = f"{topic}-{queue.partition} of {queue.broker_name}"
    if sent.handle is None:
        click.echo(f"sent {sent.id} to {where} at {sent.queue_offset}{warning}")
    else:
        click.echo(f"sent {sent.id} to {where} for later{warning}, handle {sent.handle}")


# -- query ------------------------------------------------------------------------------------------------------------


@message.command(
    epilog=examples(
        "metaq message query orders --key order-2003",
        "metaq message query orders --id 7F0000010B2C18B4AAC20000D8A50000",
        "metaq message query orders --from 2026-01-31T12:00 --to 2026-01-31T12:05 --count 100",
        "metaq message query orders --from 10m --tag 'paid || refunded' --json",
    )
)
@click.argument("topic")
@click.option("--key", metavar="KEY", help="With this key.")
@click.option("--id", "message_id", metavar="ID", help="With this id: the sender's or the broker's.")
@click.option("--from", "begin", type=When(), help="Stored then or later.")
@click.option("--to", "end", type=When(), help="Stored before.  [default: now]")
@click.option("--tag", metavar="TAGS", help="With one of these tags: paid || refunded.")
@click.option("--count", type=IntRange(1), default=DEFAULT_COUNT, show_default=True, metavar="N", help="Show at most N.")
@registry_option
@json_option
def query(
    topic: str,
    key: str | None,
    message_id: str | None,
    begin: datetime | None,
    end: datetime | None,
    tag: str | None,
    count: int,
    registry: str,
    as_json: bool,
) -> int:
    """Find messages of TOPIC by key, by id, or by the time at which they were stored.

    What was searched is printed to standard error. With --key the times narrow the search; brokers return at most the newest
    64 messages with a key.

    """
    if (key is not None) + (message_id is not None) + (key is None and begin is not None) != 1:
        raise click.UsageError("give one of --key, --id and --from")
    matches = wanted(topic, tag, None)
    with connect_registry(registry) as client:
        admin = client.admin()
        route = admin.route(topic)
        if message_id is not None:
            found = by_id(admin, [topic], message_id)
        elif key is not None:
            found = admin.query_by_key(topic, key, most=count, begin=begin, end=end)
        else:
            assert begin is not None
            found = list(islice(filter(matches, by_time(client, topic, begin, end or datetime.now(UTC))), count))
        oldest_ms = min((one.store_ms for one in oldest(admin, topic)), default=0)
    found = list(filter(matches, found))
    print_messages(found, as_json=as_json)
    brokers = ", ".join(sorted(data.broker_name for data in route.queues))
    what = f"key {key!r}" if key is not None else f"id {message_id}" if message_id is not None else "time"
    tagged = "" if tag is None else f" and tag {tag!r}"
    since = "" if begin is None else f", stored from {local_time(unix_ms(begin))}"
    until = "" if end is None else f", before {local_time(unix_ms(end))}"
    kept = f"its oldest message was stored {local_time(oldest_ms)}" if oldest_ms else "it has no messages"
    click.echo(f"{len(found)} found; searched {topic} on {brokers} by {what}{tagged}{since}{until}; {kept}", err=True)
    return 0 if found else FAILED


query.help = f"{(query.help or '').rstrip()}\n\n    {TIMES}"


def oldest(admin: Admin, topic: str) -> Iterator[ReceivedMessage]:
    """Yield the oldest message of each partition that has any."""
    for view in admin.queues(topic):
        if view.begin < view.end:
            yield from admin.read(view.queue, view.begin, view.begin + 1)


def by_time(client: Client, topic: str, begin: datetime, end: datetime) -> Iterator[ReceivedMessage]:
    """Return the messages of all partitions, the oldest first."""
    admin = client.admin()
    with client.pull_consumer(topic) as consumer:
        spans = [(queue, consumer.offset_at(queue, begin), consumer.offset_at(queue, end)) for queue in consumer.partitions()]
    return heapq.merge(*(admin.read(*span) for span in spans if span[1] < span[2]), key=when_stored)


def by_id(admin: Admin, topics: list[str], message_id: str) -> list[ReceivedMessage]:
    """Return messages with an id of either kind: a broker's has its address in it, any other is the sender's."""
    try:
        place = decode_offset_id(message_id)
    except BadRequest:
        place = None
    if place is not None:
        # of a broker's processes one, the master if there is one: all have the same messages
        makers = {
            broker.name: broker.address for broker in reversed(admin.brokers()) if place.is_of(*parse_address(broker.address))
        }
        if makers:
            return _of_makers(admin, makers.values(), message_id)
    return [one for topic in topics for one in admin.query_by_id(topic, message_id)]


def _of_makers(admin: Admin, addresses: Iterable[str], message_id: str) -> list[ReceivedMessage]:
    """Return the messages with an id that any of these brokers may have made.

    An error of one is raised only when none of them has the message: it may be there.
    """
    found: list[ReceivedMessage] = []
    errors: list[MetaqError] = []
    for address in addresses:
        try:
            one = admin.query_by_offset_id(message_id, address=address)
        except MetaqError as error:
            errors.append(error)
        else:
            found += [] if one is None else [one]
    if errors and not found:
        raise errors[0]
    return found


class _AdminTraces:
    """Where messages leave traces in a cluster."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self.groups_of_topic, self.offsets, self.members = admin.groups_of_topic, admin.offsets, admin.members

    def copies(self, topic: str, message_id: str) -> list[ReceivedMessage]:
        try:
            return self._admin.query_by_id(topic, message_id)
        except RouteNotFound as error:
            if error.retriable:
                raise
            return []


def _tracks(admin: Admin, found: ReceivedMessage) -> list[Row]:
    """Return the state of a message in each group that consumes its topic."""
    traces = _AdminTraces(admin)
    groups = admin.groups_of_topic(found.queue.topic)
    return [{"group": group, "state": track_of(traces, group, found)} for group in groups]


# -- show -------------------------------------------------------------------------------------------------------------


@message.command(epilog=examples("metaq message show 7F0000010B2C18B4AAC20000D8A50000 --topic orders"))
@click.argument("message_id", metavar="ID")
@click.option("--topic", metavar="TOPIC", help="The topic to search.  [default: all topics]")
@registry_option
@json_option
def show(message_id: str, topic: str | None, registry: str, as_json: bool) -> int:
    """Show the message with an id, the sender's or the broker's, and which groups have consumed it."""
    with connect_registry(registry) as client:
        admin = client.admin()
        system = set() if topic else set(admin.system_topics())
        topics = [topic] if topic else [name for name in admin.topics() if name not in system]
        found = by_id(admin, topics, message_id)
        seen = [(one, _tracks(admin, one)) for one in found]
    for number, (one, groups) in enumerate(seen):
        if as_json:
            print_json({**describe(one), "groups": groups})
            continue
        if number:
            click.echo()
        print_record({**describe(one), "size": len(one.body)}, as_json=False)
        if groups:
            click.echo()
            print_rows(groups, as_json=False)
    if not found:
        where = f"topic {topic}" if topic else f"{len(topics)} topics"
        click.echo(f"metaq: no message with the id {message_id}; searched {where} by sender's and broker's id", err=True)
    return 0 if found else FAILED


# -- tail -------------------------------------------------------------------------------------------------------------


def newest(admin: Admin, topic: str, count: int, matches: Matches) -> list[ReceivedMessage]:
    """Return the newest messages of all partitions that match, the oldest of them first."""
    found: list[ReceivedMessage] = []
    for view in admin.queues(topic):
        reach = count
        # It is not known how far back that many matches are: look back further until there are enough.
        while True:
            first = max(view.begin, view.end - reach)
            matching = [one for one in admin.read(view.queue, first, view.end) if matches(one)]
            if len(matching) >= count or first == view.begin or reach >= FURTHEST_BACK:
                break
            reach = min(reach * _GROWTH, FURTHEST_BACK)
        found += matching
    return sorted(found, key=when_stored)[-count:] if count else []


@message.command(
    epilog=examples(
        "metaq message tail orders --tag 'paid || refunded' -f", 'metaq message tail orders --sql "amount > 100" -n 3 --json'
    )
)
@click.argument("topic")
@click.option("-f", "--follow", is_flag=True, help="Continue with new messages until interrupted.")
@click.option("-n", "--count", type=IntRange(0), default=10, show_default=True, metavar="N", help="Messages to begin with.")
@click.option("--tag", metavar="TAGS", help="Only messages with one of these tags: paid || refunded.")
@click.option("--sql", metavar="CONDITION", help="Only messages whose properties meet this SQL92 condition.")
@registry_option
@json_option
def tail(topic: str, follow: bool, count: int, tag: str | None, sql: str | None, registry: str, as_json: bool) -> int:
    """Print the newest messages of TOPIC from all partitions, or follow it.

    Bodies are printed as they are, each followed by a newline. With a tag or a condition, up to 10,000 messages of each
    partition are searched for the newest ones.
    """
    matches = wanted(topic, tag, sql)
    with connect_registry(registry) as client, client.pull_consumer(topic, tags=tag or EVERYTHING, sql=sql) as consumer:
        admin = client.admin()
        if follow:
            for queue in consumer.partitions():
                consumer.read_from(queue, consumer.end_offset(queue))
        found = newest(admin, topic, count, matches)
        # Messages that came between the two requests are in both answers.
        behind = {queue: consumer.position(queue) for queue in consumer.assignment()}
        write([one for one in found if one.queue_offset < behind.get(one.queue, one.queue_offset + 1)], as_json=as_json)
        counted = time.monotonic()
        while follow:
            write([one for one in consumer.poll(_WAIT_S) if matches(one)], as_json=as_json)
            if time.monotonic() >= counted + _COUNT_S:
                _read_added(admin, consumer)
                counted = time.monotonic()
    if not found and count:
        click.echo(f"metaq: nothing in {topic}{' that matches' if tag or sql else ''}", err=True)
    return 0 if found or not count else FAILED


def _read_added(admin: Admin, consumer: PullConsumer) -> None:
    """Read the partitions, too, that the topic has got meanwhile."""
    with suppress(RouteNotFound):  # its brokers may be back soon
        admin.route(consumer.topic)  # as it is now
        for queue in set(consumer.partitions()) - set(consumer.assignment()):
            consumer.read_from(queue, 0)


def write(found: list[ReceivedMessage], *, as_json: bool) -> None:
    """Write messages to standard output, and flush them to the reader."""
    out = sys.stdout.buffer
    out.writelines(json_line(describe(one)) if as_json else one.body + b"\n" for one in found)
    out.flush()
