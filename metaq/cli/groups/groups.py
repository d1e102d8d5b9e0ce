"""``metaq group``: consumer groups, their lags, and why one does not consume."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import click

from metaq.cli.common import (
    FAILED,
    NOTHING_CHANGED,
    SYSTEM_GROUP,
    Decorated,
    connect_registry,
    examples,
    json_option,
    print_json,
    registry_option,
    yes_option,
)
from metaq.cli.doctor.findings import print_findings
from metaq.cli.doctor.groupfacts import collect, dead_letters_of, watch, watch_option, work_of
from metaq.cli.groups.known import known_group
from metaq.cli.numbers import IntRange
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import Row, print_record, print_rows
from metaq.cli.times import TIMES, When
from metaq.client import Admin, ConsumeFrom
from metaq.client.admin.views import GroupView, LagView, MemberView, OffsetChange, group_field
from metaq.diagnosis.groupchecks import diagnose
from metaq.errors import ClientError, RouteNotFound, RouteProblem
from metaq.message import DEAD_PREFIX, RETRY_PREFIX
from metaq.protocol.remoting.attributes import GROUP_ATTRIBUTES, check_attributes


@click.group(cls=Suggesting)
def group() -> None:
    """Show consumer groups, move their offsets, find out why one does not consume."""


def one_group(command: Callable[..., Any]) -> Decorated:
    """Add the arguments that all commands about one group take."""
    return click.argument("group")(registry_option(json_option(command)))


# -- looking ----------------------------------------------------------------------------------------------------------


@group.command("list", epilog=examples("metaq group list", "metaq group list --json"))
@click.option("--all", "show_all", is_flag=True, help="Also groups of brokers and of tools.")
@registry_option
@json_option
def list_groups(show_all: bool, registry: str, as_json: bool) -> None:
    """List consumer groups with the number of members, their topics, and how many messages they are behind."""
    with connect_registry(registry) as client:
        admin = client.admin()
        views = [view for view in admin.groups() if show_all or not SYSTEM_GROUP.fullmatch(view.name)]
        rows = [summary(admin, view) for view in views]
    print_rows(rows, as_json=as_json, hidden=hidden_columns(rows))
    if not rows and not as_json:
        click.echo("no groups", err=True)


def summary(admin: Admin, view: GroupView) -> Row:
    """Return a group as one row."""
    online = admin.members(view.name)
    lags = admin.group_lag(view.name)
    leased = [lag.leased for lag in lags if lag.leased is not None]
    topics = {lag.queue.topic for lag in lags} | set(() if online is None else online.subscriptions)
    return {
        "group": view.name,
        "members": 0 if online is None else len(online.members),
        "model": "" if online is None else online.model.lower(),
        "topics": sorted(topic for topic in topics if not topic.startswith(RETRY_PREFIX)),
        "lag": sum(lag.lag for lag in lags) if lags else None,
        "in_flight": sum(lag.in_flight for lag in leased) if leased else None,
        "delayed": sum(lag.delayed for lag in leased) if leased else None,
        "enabled": view.consume_enable,
    }


def hidden_columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the columns about leases if no row has anything in them."""
    return () if any(row["in_flight"] is not None for row in rows) else ("in_flight", "delayed")


@group.command(epilog=examples("metaq group show billing", "metaq group show billing --json"))
@one_group
def show(group: str, registry: str, as_json: bool) -> int:
    """Show GROUP: its settings, its members, and what each member subscribes to and consumes."""
    with connect_registry(registry) as client:
        admin = client.admin()
        view = known_group(admin, group)
        dead = dead_letters_of(admin, group)
        row = {**summary(admin, view), "retry_max_times": view.retry_max_times, "dead_letters": dead}
        online = admin.members(group)
        members = [described(admin, group, member) for member in (() if online is None else online.members)]
    if as_json:
        print_json({**row, "clients": members})
        return 0
    hidden = hidden_columns([row])
    print_record({key: value for key, value in row.items() if key not in hidden}, as_json=False)
    if members:
        click.echo()
        print_rows(members, as_json=False, hidden=("registries",))
    return 0


def described(admin: Admin, group: str, member: MemberView) -> Row:
    """Return a member with its report on itself."""
    work = work_of(admin, group, member.client_id)
    row = {"client_id": member.client_id, "address": member.address, "language": member.language, "version": member.version}
    if work is None:
        return {**row, "partitions": None, "subscriptions": None, "registries": None}
    topics = {queue.topic for queue in work.queues if not queue.topic.startswith(RETRY_PREFIX)}
    partitions = {topic: sum(queue.topic == topic for queue in work.queues) for topic in sorted(topics)}
    wanted = {name: one.expression for name, one in work.subscriptions.items() if not name.startswith(RETRY_PREFIX)}
    return {**row, "partitions": partitions, "subscriptions": wanted, "registries": work.registries}


@group.command(epilog=examples("metaq group lag billing", "metaq group lag billing --topic orders --json"))
@click.option("--topic", metavar="TOPIC", help="Only in this topic.")
@one_group
def lag(group: str, topic: str | None, registry: str, as_json: bool) -> int:
    """Show how far GROUP is in each partition."""
    with connect_registry(registry) as client:
        admin = client.admin()
        known_group(admin, group)
        if topic is not None:
            admin.route(topic)
        lags = admin.group_lag(group, topic)
    if not lags:
        where = "" if topic is None else f" in {topic}"
        advice = f"metaq why-not-consuming {group} says whether it consumes"
        click.echo(f"metaq: the group {group} has never committed an offset{where}, so it has no lag; {advice}", err=True)
        return FAILED
    rows = [lag_row(view) for view in lags]
    print_rows(rows, as_json=as_json, hidden=hidden_columns(rows))
    if not as_json:
        click.echo(f"{sum(view.lag for view in lags)} messages behind")
    return 0


def lag_row(view: LagView) -> Row:
    """Return a partition as one row."""
    return {
        "topic": view.queue.topic,
        "broker": view.queue.broker_name,
        "partition": view.queue.partition,
        "committed": view.committed,
        "end": view.end,
        "lag": view.lag,
        "in_flight": None if view.leased is None else view.leased.in_flight,
        "delayed": None if view.leased is None else view.leased.delayed,
        "consumed_ms": view.consumed_ms,
    }


# -- changing ---------------------------------------------------------------------------------------------------------


@group.command(
    "reset-offset",
    epilog=examples(
        "metaq group reset-offset billing orders --to-time 2h         # what would change",
        "metaq group reset-offset billing orders --to-time 2026-01-31T12:00 --yes",
        "metaq group reset-offset billing --to-end --yes              # all its topics",
        "metaq group reset-offset billing orders --to-offset 100 --partition 3 --yes",
    ),
    help=f"""Move the offsets of GROUP in TOPICs, or in all its topics.

    Connected members continue there at once, but may still finish the messages that they already have.

    {TIMES}""",
)
@click.argument("group")
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--to-time", type=When(), help="To the first message stored at TIME or later.")
@click.option("--to-offset", type=IntRange(0), metavar="N", help="To this offset, or the nearest that exists.")
@click.option("--to-begin", is_flag=True, help="To the oldest message.")
@click.option("--to-end", is_flag=True, help="To the end: only messages from now on.")
@click.option(
    "--partition",
    "partitions",
    type=IntRange(0),
    multiple=True,
    metavar="N",
    help="Only in this partition; may be repeated.",
)
@yes_option
@registry_option
@json_option
def reset_offset(
    group: str,
    topics: tuple[str, ...],
    to_time: datetime | None,
    to_offset: int | None,
    to_begin: bool,
    to_end: bool,
    partitions: tuple[int, ...],
    yes: bool,
    registry: str,
    as_json: bool,
) -> int:
    given = (to_time, to_offset, ConsumeFrom.FIRST if to_begin else None, ConsumeFrom.LAST if to_end else None)
    chosen = [to for to in given if to is not None]
    if len(chosen) != 1:
        raise click.UsageError("give one of --to-time, --to-offset, --to-begin and --to-end")
    with connect_registry(registry) as client:
        admin = client.admin()
        known_group(admin, group)
        names = topics or [topic for topic in admin.topics_of_group(group) if not topic.startswith(RETRY_PREFIX)]
        reset = partial(admin.reset_offset, group, to=chosen[0], partitions=partitions or None)
        plan = reset_plan(reset, names, named=bool(topics))
        changes: list[OffsetChange] = []
        topic = ""
        try:
            for topic, planned in plan.items():
                changes += reset(topic, apply=True) if yes else planned
        except ClientError:
            click.echo(f"metaq: some offsets in the topic {topic} may have been set, too", err=True)
            raise
        finally:  # also what was set before an error
            print_changes(changes, applied=yes, as_json=as_json)
    if not changes:
        if partitions and plan:
            absent = (
                f"{', '.join(plan)} has no partition {', '.join(map(str, partitions))}; metaq topic show shows those it has"
            )
        else:
            absent = f"the group {group} has no offsets in any topic; name the TOPIC in which it shall have some"
        click.echo(f"metaq: {absent}", err=True)
        return FAILED
    return 0


def reset_plan(
    reset: Callable[[str], list[OffsetChange]], topics: Iterable[str], *, named: bool
) -> dict[str, list[OffsetChange]]:
    """Return by topic what would change. Topics that do not exist are reported and left out, unless a person ``named`` them."""
    plan = {}
    for topic in topics:
        try:
            plan[topic] = reset(topic)
        except RouteNotFound as error:
            if named or error.reason is not RouteProblem.TOPIC_ABSENT:
                raise
            click.echo(f"metaq: the topic {topic} does not exist; it is left out", err=True)
    return plan


def print_changes(changes: Sequence[OffsetChange], *, applied: bool, as_json: bool) -> None:
    """Print the offsets that were set, or would be."""
    if as_json:
        print_rows([{**offset_row(change), "applied": applied} for change in changes], as_json=True)
    elif changes:
        print_rows(map(offset_row, changes), as_json=False)
        click.echo(f"{len(changes)} offsets were set" if applied else NOTHING_CHANGED, err=not applied)


def offset_row(change: OffsetChange) -> Row:
    """Return the change of one partition's offset as a row."""
    queue, before, after = change
    place = {"topic": queue.topic, "broker": queue.broker_name, "partition": queue.partition}
    return {**place, "before": before, "after": after, "change": after - (before or 0)}


@group.command(
    epilog=examples(
        "metaq group update billing --retry-max-times 3",
        "metaq group update billing --no-consume      # pause it",
        "metaq group update billing --attribute priority.factor=80 --attribute order=key",
    )
)
@click.argument("group")
@click.option("--consume/--no-consume", default=None, help="Whether the group may consume.")
@click.option("--broadcast/--no-broadcast", default=None, help="Whether its members may consume as broadcasts.")
@click.option(
    "--retry-max-times",
    type=IntRange(0),
    metavar="N",
    help="Deliveries of a leased message before it is a dead letter; consumers that pull bring their own number.",
)
@click.option(
    "--attribute",
    "attributes",
    multiple=True,
    metavar="NAME=VALUE",
    help=f"A further setting: {', '.join(GROUP_ATTRIBUTES)}; may be repeated. Without a value: the default.",
)
@registry_option
@json_option
def update(
    group: str,
    consume: bool | None,
    broadcast: bool | None,
    retry_max_times: int | None,
    attributes: tuple[str, ...],
    registry: str,
    as_json: bool,
) -> None:
    """Change the settings of GROUP on all brokers, or create it. Other settings stay as they are on each broker."""
    values = {name: value for name, _, value in (pair.partition("=") for pair in attributes)}
    unset = {
        name: str(GROUP_ATTRIBUTES[name].default) for name, value in values.items() if not value and name in GROUP_ATTRIBUTES
    }
    check_attributes(GROUP_ATTRIBUTES, values := values | unset)
    with connect_registry(registry) as client:
        admin = client.admin()
        view = next((view for view in admin.groups() if view.name == group), GroupView(group))
        given: Row = {"consume_enable": consume, "consume_broadcast_enable": broadcast, "retry_max_times": retry_max_times}
        changes = {name: value for name, value in given.items() if value is not None}
        view = view.with_attributes(values)._replace(**changes)
        admin.update_group(view, fields=[*changes, *map(group_field, values)])
    row = {"group": group, **{name: value for name, value in view._asdict().items() if name != "name"}}
    row["max_invisible_s"] = row.pop("max_invisible_ms") / 1000  # a key in _ms is a point of time
    print_record(row, as_json=as_json)


@group.command(epilog=examples("metaq group delete billing", "metaq group delete billing --yes"))
@click.argument("group")
@yes_option
@registry_option
@json_option
def delete(group: str, yes: bool, registry: str, as_json: bool) -> int:
    """Delete GROUP with its offsets, its retries and its dead letters."""
    with connect_registry(registry) as client:
        admin = client.admin()
        if not {f"{RETRY_PREFIX}{group}", f"{DEAD_PREFIX}{group}"} & set(admin.topics()):  # what a failed deletion has left
            known_group(admin, group)
        online = admin.members(group)
        members = 0 if online is None else len(online.members)
        dead = dead_letters_of(admin, group)
        if yes:
            admin.delete_group(group)
    if as_json:
        print_json({"group": group, "members": members, "dead_letters": dead, "deleted": yes})
        return 0
    also = f" and {dead} dead letters" if dead else ""
    click.echo(f"{'deleted' if yes else 'would delete'} {group} with its offsets{also}; consumers connected: {members}")
    if members:
        click.echo("metaq: connected consumers create the group again; stop them first", err=True)
    if not yes:
        click.echo(NOTHING_CHANGED, err=True)
    return 0


# -- why --------------------------------------------------------------------------------------------------------------


@click.command(
    "why-not-consuming",
    epilog=examples("metaq why-not-consuming billing", "metaq why-not-consuming billing --topic orders --json"),
)
@click.option("--topic", metavar="TOPIC", help="Only in this topic.  [default: all that it subscribes to, or has offsets in]")
@watch_option()
@one_group
def why_not_consuming(group: str, topic: str | None, watch_s: float, registry: str, as_json: bool) -> int:
    """Check everything that can keep GROUP from consuming, and advise what to do.

    The exit code is 0 if all is well, 1 for a warning, 2 for a problem.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        (facts,) = watch(admin, [collect(admin, group, topic)], watch_s)
    return print_findings(diagnose(facts), as_json=as_json)


group.add_command(why_not_consuming)
