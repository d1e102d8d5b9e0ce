"""``metaq topic``: topics of all brokers through the registry, or of one broker over the text protocol."""

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

import click
from click.core import ParameterSource

from metaq.address import Address
from metaq.cli.admin import CONFIG, TOPICS, parse_config, structured
from metaq.cli.common import (
    NOTHING_CHANGED,
    Decorated,
    broker_option,
    command_login,
    connect_registry,
    connect_text,
    examples,
    json_option,
    print_json,
    registry_option,
    yes_option,
)
from metaq.cli.numbers import IntRange
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import Row, print_record, print_rows
from metaq.cli.times import SpanOption
from metaq.client import Admin
from metaq.client.admin.views import TopicView, permission_text
from metaq.errors import RouteNotFound, RouteProblem
from metaq.message import DEAD_PREFIX, MAX_PARTITIONS, RETRY_PREFIX
from metaq.protocol.remoting.codes import MASTER, READ, WRITE

PERMISSIONS: Final = {"rw": READ | WRITE, "r": READ, "w": WRITE, "none": 0}
_ROUTE_ONLY: Final = "needs a registry: leave --broker out"


@click.group(cls=Suggesting)
def topic() -> None:
    """Create, show and delete topics."""


def either_option(command: Decorated) -> Decorated:
    """Add ``--registry`` and ``--broker``; ``means_one_broker`` decides between them."""
    return registry_option(broker_option(command))


def means_one_broker() -> bool:
    """Return whether ``--broker`` counts: it is named in a place that counts more than the one where the registry is named.

    That is the command line, a context that it names, the environment, or the context in use.
    """
    source = click.get_current_context().get_parameter_source
    applied = command_login().applied
    ranks = [ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE]
    if applied is not None and applied.explicit:
        ranks[1:3] = ranks[2], ranks[1]
    broker, registry = (ranks.index(source(name) or ParameterSource.DEFAULT) for name in ("broker", "registry"))
    return broker > registry or broker == len(ranks) - 1


# -- list and create --------------------------------------------------------------------------------------------------


@topic.command(
    "list", epilog=examples("metaq topic list", "metaq topic list --all --json", "metaq topic list --broker 127.0.0.1:8123")
)
@click.option("--all", "show_all", is_flag=True, help="Also the brokers' own topics, and those of retries and dead letters.")
@either_option
@json_option
def list_topics(show_all: bool, registry: str, broker: Address, as_json: bool) -> None:
    """List topics.

    Lists topics of all brokers that the registry knows; with --broker those of one broker, and what is in them.
    """
    if means_one_broker():
        with connect_text(broker) as client:
            rows = describe_topics(client.stats(TOPICS), client.stats(CONFIG))
        for row in rows:
            if as_json:
                print_json(row)
            else:
                click.echo("{topic}: partitions {partitions}, messages {messages}, bytes {bytes}".format(**row))
        return
    with connect_registry(registry) as client:
        admin = client.admin()
        hidden = set() if show_all else set(admin.system_topics())
        views = [view for view in admin.all_topic_configs() if show_all or is_of_users(view.topic, hidden)]
    levels = {view.topic for view in views if view.priority}
    print_rows([{**row, "priority": row["topic"] in levels} for row in merged(views)], as_json=as_json)


def is_of_users(name: str, system: set[str]) -> bool:
    """Return whether a topic is one that users made, and not one for retries, dead letters or a broker itself."""
    return name not in system and not name.startswith((RETRY_PREFIX, DEAD_PREFIX))


def merged(views: Iterable[TopicView]) -> list[Row]:
    """Return one row for each topic, whichever brokers have it."""
    topics: dict[str, list[TopicView]] = {}
    for view in views:
        topics.setdefault(view.topic, []).append(view)
    return [
        {
            "topic": name,
            "partitions": sum(view.write_partitions for view in of_one),
            "permission": ", ".join(sorted({view.permission_text for view in of_one})),
            "ordered": any(view.ordered for view in of_one),
            "brokers": [view.broker_name for view in of_one],
        }
        for name, of_one in topics.items()
    ]


def describe_topics(text: str, config: str) -> list[dict[str, Any]]:
    """Return all topics of a broker.

    ``stats topics`` has their contents, and ``stats config`` also those without data.
    """
    contents = structured(TOPICS, text)
    rows = []
    for section, settings in parse_config(config).items():
        kind, _, name = section.partition("=")
        if kind == "topic":
            content = contents.get(name, {})
            rows.append(
                {
                    "topic": name,
                    "partitions": settings["numPartitions"],
                    "messages": content.get("message_count", 0),
                    "bytes": content.get("message_bytes", 0),
                    "accept_publish": settings["acceptPublish"],
                    "accept_subscribe": settings["acceptSubscribe"],
                }
            )
    return rows


@topic.command(
    epilog=examples(
        "metaq topic create orders 8",
        "metaq topic create orders --permission r      # from now on nobody sends",
        "metaq topic create alarms 3 --priority       # priorities 0 to 2",
        "metaq topic create trades 4 --ordered --on broker-a --on broker-b",
    )
)
@click.argument("topic")
@click.argument("partitions", type=IntRange(1, MAX_PARTITIONS), required=False)
@click.option("--permission", type=click.Choice(list(PERMISSIONS)), help="What clients may do.  [default: unchanged, or rw]")
@click.option("--ordered", is_flag=True, help="Mark it as ordered, in the registries, too.")
@click.option(
    "--priority/--no-priority",
    default=None,
    help="Whether each partition is a level of priority, the greater the more urgent.  [default: unchanged, or no]",
)
@click.option(
    "--priority-max-wait-ms",
    type=IntRange(0),
    metavar="MS",
    help="How long a message waits before its partition is served first; 0: for ever.  [default: unchanged, or 60000]",
)
@click.option(
    "--dedupe-window",
    "window",
    type=SpanOption(),
    help="How long a message is not stored again under an id that was stored; 0s: it always is.  [default: unchanged]",
)
@click.option(
    "--on", "names", multiple=True, metavar="NAME", help="Only on this broker; may be repeated.  [default: all masters]"
)
@either_option
@json_option
def create(
    topic: str,
    partitions: int | None,
    permission: str | None,
    ordered: bool,
    priority: bool | None,
    priority_max_wait_ms: int | None,
    window: timedelta | None,
    names: tuple[str, ...],
    registry: str,
    broker: Address,
    as_json: bool,
) -> None:
    """Create TOPIC, add partitions, or change its permission.

    PARTITIONS is how many it shall have on each broker where it has fewer. Without it each broker keeps its number; where
    the topic is new, it gets 1.
    """
    if means_one_broker():
        given: dict[str, object] = {
            "--permission": permission,
            "--ordered": ordered or None,
            "--on": names or None,
            "--priority": priority,
        }
        given |= {"--priority-max-wait-ms": priority_max_wait_ms, "--dedupe-window": window}
        if refused := [name for name, value in given.items() if value is not None]:
            raise click.UsageError(f"{refused[0]} {_ROUTE_ONLY}")
        with connect_text(broker) as client:
            counts = {str(broker): client.create(topic, partitions or 1)}
            row: dict[str, Any] = {"topic": topic, "partitions": counts[str(broker)]}
    else:
        with connect_registry(registry) as remote:
            window_ms = None if window is None else round(window.total_seconds() * 1000)
            wanted = Wanted(permission, ordered, priority, priority_max_wait_ms, window_ms)
            counts, row = create_on_brokers(remote.admin(), topic, partitions, wanted, names)
    if as_json:
        print_json(row)
    else:
        click.echo(f"{topic} has {described(counts)}")


def described(counts: Mapping[str, int]) -> str:
    """Return the numbers of partitions by broker in words."""
    (name, first), *others = counts.items()
    several = f"{first} partition{'' if first == 1 else 's'}"
    if not others:
        return several
    if set(counts.values()) == {first}:
        return f"{several} on each of {', '.join(counts)}"
    return " and ".join([f"{several} on {name}", *(f"{count} on {other}" for other, count in others)])


class Wanted(NamedTuple):
    """The properties that a topic shall have; ``None``: those that it has."""

    permission: str | None
    ordered: bool
    priority: bool | None
    priority_max_wait_ms: int | None
    dedupe_window_ms: int | None


def create_on_brokers(
    admin: Admin, topic: str, partitions: int | None, wanted: Wanted, names: tuple[str, ...]
) -> tuple[dict[str, int], dict[str, Any]]:
    """Create or change a topic. Return the partitions that take messages by broker, and its state as one row."""
    existing = {view.broker_name: view for view in known_views(admin, topic)}
    brokers = list(names) or [broker.name for broker in admin.masters()]
    counts = dict.fromkeys(brokers, partitions or 1)
    for name in counts.keys() & existing.keys():
        counts[name] = max(partitions or 0, existing[name].write_partitions)
    bits = None if wanted.permission is None else PERMISSIONS[wanted.permission]
    admin.create_topic(
        topic,
        counts,
        permission=bits,
        ordered=wanted.ordered,
        priority=wanted.priority,
        priority_max_wait_ms=wanted.priority_max_wait_ms,
        dedupe_window_ms=wanted.dedupe_window_ms,
        broker_names=tuple(brokers),
    )
    kept = {name: view.permission for name, view in existing.items()}
    told = {permission_text(kept.get(name, READ | WRITE) if bits is None else bits) for name in brokers}
    most = max(counts.values())
    return counts, {"topic": topic, "partitions": most, "permission": ", ".join(sorted(told)), "brokers": brokers}


def known_views(admin: Admin, topic: str) -> list[TopicView]:
    """Return a topic's settings on the brokers; an empty list when it does not exist."""
    try:
        return admin.topic_config(topic)
    except RouteNotFound as error:
        if error.reason is not RouteProblem.TOPIC_ABSENT:
            raise
        return []


# -- one topic --------------------------------------------------------------------------------------------------------


def one_topic(command: Callable[..., Any]) -> Decorated:
    """Add the arguments that all commands about one topic take."""
    return click.argument("topic")(registry_option(json_option(command)))


@topic.command(epilog=examples("metaq topic show orders", "metaq topic show orders --json"))
@one_topic
def show(topic: str, registry: str, as_json: bool) -> None:
    """Show what is in TOPIC, and which groups consume it.

    A group with members is one that consumes now; its messages behind are those that it has not committed.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        (row,) = merged(admin.topic_config(topic))
        queues = admin.queues(topic)
        partitions = [
            {
                "broker": view.queue.broker_name,
                "partition": view.queue.partition,
                "begin": view.begin,
                "end": view.end,
                "messages": view.end - view.begin,
                "updated_ms": view.updated_ms,
            }
            for view in sorted(queues)
        ]
        groups = [consuming(admin, group, topic) for group in admin.groups_of_topic(topic)]
    messages = sum(view.end - view.begin for view in queues)
    if as_json:
        print_json({**row, "messages": messages, "queues": partitions, "groups": groups})
        return
    print_record({**row, "messages": messages}, as_json=False)
    click.echo()
    print_rows(partitions, as_json=False)
    if groups:
        click.echo()
        print_rows(groups, as_json=False)


def consuming(admin: Admin, group: str, topic: str) -> Row:
    """Return a group that consumes a topic as one row."""
    online = admin.members(group)
    wanted = "" if online is None else online.subscriptions.get(topic, "")
    lag = sum(view.lag for view in admin.group_lag(group, topic))
    return {"group": group, "members": 0 if online is None else len(online.members), "expression": wanted, "lag": lag}


@topic.command(epilog=examples("metaq topic route orders"))
@one_topic
def route(topic: str, registry: str, as_json: bool) -> None:
    """Show the route of TOPIC, as clients receive it from the registry.

    If there is none, the reason is printed: no registry answers, no such topic, no live broker, or no permission.
    """
    with connect_registry(registry) as client:
        found = client.admin().route(topic)
    addresses = {broker.name: broker for broker in found.brokers}
    print_rows(
        [
            {
                "broker": data.broker_name,
                "cluster": addresses[data.broker_name].cluster,
                "role": "master" if number == MASTER else f"replica {number}",
                "address": address,
                "write_partitions": data.write_queues,
                "read_partitions": data.read_queues,
                "permission": permission_text(data.permission),
            }
            for data in found.queues
            if data.broker_name in addresses
            for number, address in sorted(addresses[data.broker_name].addresses.items())
        ],
        as_json=as_json,
    )


@topic.command(epilog=examples("metaq topic delete orders", "metaq topic delete orders --yes"))
@click.argument("topic")
@yes_option
@registry_option
@json_option
def delete(topic: str, yes: bool, registry: str, as_json: bool) -> None:
    """Delete TOPIC with its messages, on all brokers and in all registries."""
    with connect_registry(registry) as client:
        admin = client.admin()
        views = admin.topic_config(topic)
        messages = sum(view.end - view.begin for view in admin.queues(topic))
        groups = admin.groups_of_topic(topic)
        if yes:
            admin.delete_topic(topic)
    brokers = [view.broker_name for view in views]
    if as_json:
        print_json({"topic": topic, "messages": messages, "brokers": brokers, "groups": groups, "deleted": yes})
        return
    consumed = f", consumed by {', '.join(groups)}" if groups else ""
    click.echo(f"{'deleted' if yes else 'would delete'} {topic} with {messages} messages on {', '.join(brokers)}{consumed}")
    if not yes:
        click.echo(NOTHING_CHANGED, err=True)
