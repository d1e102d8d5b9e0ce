"""``metaq lease``: messages that are leased to consumers of groups."""

from itertools import islice

import click

from metaq.cli.common import connect_registry, examples, json_option, registry_option
from metaq.cli.tables import print_rows


@click.group()
def lease() -> None:
    """Show which messages consumers lease, and which come again."""


@lease.command("list", epilog=examples("metaq lease list billing", "metaq lease list billing orders --json"))
@click.argument("group")
@click.argument("topic", required=False)
@click.option(
    "--count", type=click.IntRange(1), default=1024, show_default=True, metavar="N", help="Show at most N of a broker."
)
@registry_option
@json_option
def list_partitions(group: str, topic: str | None, count: int, registry: str, as_json: bool) -> None:
    """Show the partitions in which GROUP leases messages.

    base is the lowest message that is not finished, next the first that was never given. lag is ready + in_flight + delayed;
    waiting are those of the ready ones that are to be given again.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        leases = admin.leases()
        rows = [
            {"broker": broker.name, **row._asdict()}
            for broker in admin.masters()
            for row in islice(leases.partitions(broker.address, group, topic), count)
        ]
    print_rows(rows, as_json=as_json)
    if not rows and not as_json:
        click.echo(f"{group} leases no messages", err=True)


@lease.command(epilog=examples("metaq lease show billing orders 3", "metaq lease show billing orders 3 --json --count 10000"))
@click.argument("group")
@click.argument("topic")
@click.argument("partition", type=click.IntRange(0))
@click.option(
    "--count", type=click.IntRange(1), default=100, show_default=True, metavar="N", help="Show at most N of a broker."
)
@registry_option
@json_option
def show(group: str, topic: str, partition: int, count: int, registry: str, as_json: bool) -> None:
    """Show the messages of a partition that were given to GROUP and are not finished, the lowest first.

    times counts their deliveries. leased: until due; delayed: given back, and to be given again when due; waiting: to be given
    again now; dying: on the way to the dead letters.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        leases = admin.leases()
        rows = [
            {"broker": broker.name, **row._asdict()}
            for broker in admin.masters()
            for row in islice(leases.messages(broker.address, group, topic, partition), count)
        ]
    print_rows(rows, as_json=as_json)
    if not rows and not as_json:
        click.echo("nothing is open there", err=True)
