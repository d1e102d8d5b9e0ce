"""``metaq cron``: recurring messages."""

import click

from metaq.cli.common import FAILED, connect_registry, examples, json_option, print_json, registry_option
from metaq.cli.numbers import IntRange
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import local_time, print_rows


@click.group(cls=Suggesting)
def cron() -> None:
    """Define, list and remove recurring messages."""


@cron.command(
    epilog=examples(
        "metaq cron define nightly '0 2 * * *' jobs 'start' --zone Europe/Berlin",
        "metaq cron define beat '@every 90s' beats tick --missed none",
    )
)
@click.argument("name")
@click.argument("schedule")
@click.argument("topic")
@click.argument("body")
@click.option("--zone", default="UTC", show_default=True, metavar="ZONE", help="The time zone, as Europe/Berlin.")
@click.option("--partition", type=IntRange(-1), default=-1, metavar="N", help="The partition; else each in turn.")
@click.option("--tag", default=None, help="The tag of the messages.")
@click.option("--on", "broker_name", default=None, metavar="BROKER", help="The broker's name; else the first with the topic.")
@click.option(
    "--missed",
    type=click.Choice(("last", "all", "none")),
    default="last",
    show_default=True,
    help="Times that pass while the broker is down: one message for all, one each, or none.",
)
@registry_option
@json_option
def define(
    name: str,
    schedule: str,
    topic: str,
    body: str,
    zone: str,
    partition: int,
    tag: str | None,
    broker_name: str | None,
    missed: str,
    registry: str,
    as_json: bool,
) -> int:
    """Have BODY put into TOPIC again and again, by SCHEDULE: MINUTE HOUR DAY MONTH WEEKDAY, @every 90s, @hourly or @daily.

    A recurring message NAME that the broker has already is replaced.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        names = {each.name for each in admin.route(topic).brokers} if broker_name is None else {broker_name}
        broker = next((each for each in admin.masters() if each.name in names), None)
        if broker is None:
            click.echo(f"metaq: the registry knows no master {broker_name or f'with the topic {topic}'}", err=True)
            return FAILED
        due_ms = admin.timers().define(
            broker.address, name, schedule, topic, body.encode(), zone=zone, partition=partition, tag=tag, missed=missed
        )
    if as_json:
        print_json({"name": name, "broker": broker.name, "due_ms": due_ms})
    else:
        click.echo(f"defined {name} on {broker.name}: it comes first at {local_time(due_ms)}")
    return 0


@cron.command("list", epilog=examples("metaq cron list", "metaq cron list --json"))
@registry_option
@json_option
def list_recurring(registry: str, as_json: bool) -> None:
    """List the recurring messages of all brokers."""
    with connect_registry(registry) as client:
        admin = client.admin()
        timers = admin.timers()
        rows = [
            {"broker": broker.name, **row._asdict()} for broker in admin.masters() for row in timers.recurring(broker.address)
        ]
    print_rows(rows, as_json=as_json)


@cron.command(epilog=examples("metaq cron remove nightly"))
@click.argument("name")
@registry_option
@json_option
def remove(name: str, registry: str, as_json: bool) -> int:
    """Remove the recurring message NAME from all brokers that have it."""
    removed = []
    with connect_registry(registry) as client:
        admin = client.admin()
        timers = admin.timers()
        for broker in admin.masters():
            if any(row.name == name for row in timers.recurring(broker.address)):
                timers.undefine(broker.address, name)
                removed.append(broker.name)
    if as_json:
        print_json({"name": name, "brokers": removed})
    elif removed:
        click.echo(f"removed {name} from {', '.join(removed)}")
    if not removed:
        click.echo(f"metaq: no broker has a recurring message {name}; metaq cron list shows them", err=True)
    return 0 if removed else FAILED
