"""``metaq timer``: messages that are delayed to any time."""

from itertools import islice

import click

from metaq.address import Address
from metaq.cli.common import connect_registry, connect_text, examples, json_option, print_json, registry_option
from metaq.cli.messages.topics import either_option, means_one_broker
from metaq.cli.numbers import IntRange
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import print_rows


@click.group(cls=Suggesting)
def timer() -> None:
    """List and cancel delayed messages."""


@timer.command(
    epilog=examples(
        "metaq timer cancel djEgcmVtaW5kZXJzIG1ldGFxIDE3…",
        "metaq timer cancel 1769857200000-81920-5f0c2a9b3d417e68 --broker 127.0.0.1:8123",
    )
)
@click.argument("handle")
@either_option
@json_option
def cancel(handle: str, registry: str, broker: Address, as_json: bool) -> None:
    """Cancel the delayed message with HANDLE.

    Takes the handle of metaq message send and of any other client of the registry; with --broker that of metaq put. To cancel a
    message again does no harm.
    """
    if means_one_broker():
        with connect_text(broker) as client:
            client.cancel(handle)
    else:
        with connect_registry(registry) as registered:
            registered.cancel(handle)
    if as_json:
        print_json({"handle": handle, "cancelled": True})
    else:
        click.echo("cancelled: it will not be delivered")


@timer.command("list", epilog=examples("metaq timer list", "metaq timer list --count 100000 --json"))
@click.option("--count", type=IntRange(1), default=1000, show_default=True, metavar="N", help="Show at most N of a broker.")
@registry_option
@json_option
def list_pending(count: int, registry: str, as_json: bool) -> None:
    """List the messages that wait for their time, those of each broker by it."""
    with connect_registry(registry) as client:
        admin = client.admin()
        timers = admin.timers()
        rows = [
            {"broker": broker.name, **row._asdict()}
            for broker in admin.masters()
            for row in islice(timers.pending(broker.address), count)
        ]
    print_rows(rows, as_json=as_json)


@timer.command(epilog=examples("metaq timer stats", "metaq timer stats --json"))
@registry_option
@json_option
def stats(registry: str, as_json: bool) -> None:
    """Show how many messages wait on each broker, and what became of others since it started."""
    with connect_registry(registry) as client:
        admin = client.admin()
        timers = admin.timers()
        rows = [{"broker": broker.name, **timers.stats(broker.address)} for broker in admin.masters()]
    for row in rows:
        row["timers_late_s"] = row.pop("timers_late_ms") / 1000  # a key in _ms is a point of time
    print_rows(rows, as_json=as_json)
