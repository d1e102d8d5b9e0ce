"""``metaq lease``: messages that are leased to consumers of groups, to look at, and to take and finish by hand."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from typing import Any, Final

import click

from metaq.address import Address
from metaq.cli.common import (
    FAILED,
    Decorated,
    broker_option,
    connect_registry,
    connect_text,
    examples,
    json_option,
    print_json,
    registry_option,
)
from metaq.cli.groups.known import known_group
from metaq.cli.messages.lines import body_fields
from metaq.cli.numbers import IntRange
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import print_rows
from metaq.cli.times import SpanOption
from metaq.client.text.leasing import PoppedMessage
from metaq.errors import BadRequest
from metaq.protocol.text.ids import MessageId, read_id
from metaq.protocol.text.leaselines import COUNT

MINUTE: Final = timedelta(minutes=1)
SCRIPTED: Final = ("topic", "position", "priority")
"""What people need not see of a message that they take."""


@click.group(cls=Suggesting)
def lease() -> None:
    """Show which messages consumers lease, and which come again; take messages, and finish them or give them back."""


class MessageIdParameter(click.ParamType[MessageId]):
    """The ID of a leased message."""

    name = "ID"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> MessageId:
        if isinstance(value, MessageId):
            return value
        try:
            return read_id(str(value))
        except BadRequest as error:
            self.fail(str(error), parameter, context)


def _ids_argument(command: Decorated) -> Decorated:
    return click.argument("ids", nargs=-1, required=True, type=MessageIdParameter(), metavar="ID...")(command)


@lease.command("list", epilog=examples("metaq lease list billing", "metaq lease list billing orders --json"))
@click.argument("group")
@click.argument("topic", required=False)
@click.option("--count", type=IntRange(1), default=1024, show_default=True, metavar="N", help="Show at most N of a broker.")
@registry_option
@json_option
def list_partitions(group: str, topic: str | None, count: int, registry: str, as_json: bool) -> None:
    """Show the partitions in which GROUP leases messages.

    base is the lowest message that is not finished, next the first that was never given. lag is ready + in_flight + delayed +
    lined; waiting are those of the ready ones that are to be given next; lined were never given because others with their keys
    are before them.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        leases = admin.leases()
        if topic is not None:
            admin.route(topic)
        rows = [
            {"broker": broker.name, **row._asdict()}
            for broker in admin.masters()
            for row in islice(leases.partitions(broker.address, group, topic), count)
        ]
        if not rows:
            known_group(admin, group)
    print_rows(rows, as_json=as_json)
    if not rows and not as_json:
        click.echo(f"{group} leases no messages", err=True)


@lease.command(epilog=examples("metaq lease show billing orders 3", "metaq lease show billing orders 3 --json --count 10000"))
@click.argument("group")
@click.argument("topic")
@click.argument("partition", type=IntRange(0))
@click.option("--count", type=IntRange(1), default=100, show_default=True, metavar="N", help="Show at most N of a broker.")
@registry_option
@json_option
def show(group: str, topic: str, partition: int, count: int, registry: str, as_json: bool) -> None:
    """Show the messages of a partition that were given to GROUP and are not finished, the lowest first.

    times counts their deliveries. leased: until due; delayed: given back, and to be given again when due; waiting: to be given
    now; lined: never given, because others with their keys are before them; dying: on the way to the dead letters.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        leases = admin.leases()
        rows = [
            {"broker": broker.name, **row._asdict()}
            for broker in admin.masters()
            for row in islice(leases.messages(broker.address, group, topic, partition), count)
        ]
        if not rows:
            known_group(admin, group)
            admin.route(topic)
    print_rows(rows, as_json=as_json)
    if not rows and not as_json:
        click.echo("nothing is open there", err=True)


@lease.command(
    "pop",
    epilog=examples(
        "metaq lease pop billing orders",
        "metaq lease pop billing orders --count 10 --invisible 5m --wait 30s",
        "metaq lease pop billing orders --json",
    ),
)
@click.argument("group")
@click.argument("topic")
@click.option("--count", type=IntRange(*COUNT), default=1, show_default=True, metavar="N", help="Take at most N.")
@click.option(
    "--invisible",
    type=SpanOption(),
    default=MINUTE,
    show_default="1m",
    metavar="TIME",
    help="Nobody else in GROUP gets them for so long: 90s, 15m, 3h.",
)
@click.option(
    "--wait",
    type=SpanOption(),
    default=timedelta(0),
    metavar="TIME",
    help="Wait so long for the first: 90s, 15m.  [default: none]",
)
@click.option("--attribute", metavar="TEXT", help="Only messages with this attribute; GROUP has then passed the others.")
@broker_option
@json_option
def take(
    group: str,
    topic: str,
    count: int,
    invisible: timedelta,
    wait: timedelta,
    attribute: str | None,
    broker: Address,
    as_json: bool,
) -> None:
    """Take messages of TOPIC for GROUP, and print them with their IDs.

    They are leased until they are finished (ack) or given back (nack), or their time is over: then they are given again. A
    message that is taken too often goes to the dead letters.
    """
    with connect_text(broker) as client:
        messages = client.pop(topic, group, count, invisible=invisible, wait=wait, attribute=attribute)
    print_rows((_described(message, as_json=as_json) for message in messages), as_json=as_json, hidden=SCRIPTED)
    if not messages and not as_json:
        click.echo("there is nothing to take", err=True)


def _described(message: PoppedMessage, *, as_json: bool) -> dict[str, Any]:
    """Return a message as a row: the body as text, for scripts in base64 when it is not UTF-8, and with its error if any."""
    row: dict[str, Any] = {**message._asdict(), "id": str(message.id)}
    error = row.pop("error")
    if as_json and error is not None:
        row["error"] = str(error)
    del row["body"]
    return row | (body_fields(message.body) if as_json else {"body": message.body.decode(errors="replace")})


@lease.command(
    epilog=examples("metaq lease ack billing orders 0-0-4q9zk2", "metaq lease ack billing orders 0-0-4q9zk2 0-1-7c1mx0")
)
@click.argument("group")
@click.argument("topic")
@_ids_argument
@broker_option
@json_option
def ack(group: str, topic: str, ids: Sequence[MessageId], broker: Address, as_json: bool) -> int:
    """Finish messages that GROUP has taken: they do not come again.

    The exit code is 1 when one of them was finished, or given again, before.
    """
    with connect_text(broker) as client:
        return _told("finished", client.ack(topic, group, ids), len(set(ids)), as_json=as_json)


@lease.command(
    epilog=examples(
        "metaq lease nack billing orders 0-0-4q9zk2 --delay 15m", "metaq lease nack billing orders 0-0-4q9zk2 --dead"
    )
)
@click.argument("group")
@click.argument("topic")
@_ids_argument
@click.option("--delay", type=SpanOption(), metavar="TIME", help="Give them again after 90s, 15m or 3h.  [default: at once]")
@click.option("--dead", is_flag=True, help="Send them to the dead letters of GROUP instead.")
@broker_option
@json_option
def nack(
    group: str, topic: str, ids: Sequence[MessageId], delay: timedelta | None, dead: bool, broker: Address, as_json: bool
) -> int:
    """Give messages back that GROUP has taken: they come again.

    The exit code is 1 when one of them was finished, or given again, before.
    """
    if dead and delay is not None:
        raise click.UsageError("--dead and --delay exclude each other")
    with connect_text(broker) as client:
        count = client.reject(topic, group, ids) if dead else client.nack(topic, group, ids, delay=delay)
    return _told("sent to the dead letters" if dead else "given back", count, len(set(ids)), as_json=as_json)


def _told(done: str, count: int, asked: int, *, as_json: bool) -> int:
    """Say how many messages were ended; return the exit code."""
    if as_json:
        print_json({"asked": asked, "done": count})
    else:
        rest = "" if count == asked else "; the others were finished, or given again, before"
        click.echo(f"{count} of {asked} messages {done}{rest}")
    return 0 if count == asked else FAILED
