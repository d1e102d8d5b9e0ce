"""``metaq dlq``: messages that groups have failed to consume, to look at, to send again and to discard."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import click

from metaq.cli.common import (
    FAILED,
    NOTHING_CHANGED,
    connect_registry,
    examples,
    json_option,
    print_json,
    registry_option,
    yes_option,
)
from metaq.cli.groups.known import known_group
from metaq.cli.messages.messages import DEFAULT_COUNT, describe, print_messages
from metaq.cli.numbers import IntRange
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import Row, print_rows
from metaq.client import Admin, Producer, ReceivedMessage
from metaq.client.sending.again import properties_again
from metaq.errors import BadRequest, RouteNotFound, RouteProblem
from metaq.message import DEAD_PREFIX
from metaq.protocol.properties import SHARDING_KEY

TOPIC: Final = "topic"
GROUP: Final = "group"


@click.group(cls=Suggesting)
def dlq() -> None:
    """Show dead letters, send them again, and discard them."""


@dlq.command("list", epilog=examples("metaq dlq list"))
@registry_option
@json_option
def list_groups(registry: str, as_json: bool) -> None:
    """List the groups that have dead letters, and how many each has."""
    with connect_registry(registry) as client:
        admin = client.admin()
        topics = [topic for topic in admin.topics() if topic.startswith(DEAD_PREFIX)]
        rows: list[Row] = []
        for topic in topics:
            group = topic.removeprefix(DEAD_PREFIX)
            messages = admin.count_dead_letters(group)
            newest_ms = max((view.updated_ms for view in admin.queues(topic)), default=0)
            if messages:
                rows.append({"group": group, "messages": messages, "newest_ms": newest_ms})
    print_rows(rows, as_json=as_json)
    if not rows and not as_json:
        click.echo("no group has dead letters", err=True)


@dlq.command(epilog=examples("metaq dlq show billing", "metaq dlq show billing --count 1000 --json"))
@click.argument("group")
@click.option("--count", type=IntRange(1), default=DEFAULT_COUNT, show_default=True, metavar="N", help="Show at most N.")
@registry_option
@json_option
def show(group: str, count: int, registry: str, as_json: bool) -> int:
    """Show GROUP's dead letters, partition by partition, the oldest first."""
    with connect_registry(registry) as client:
        admin = client.admin()
        found = admin.dead_letters(group, most=count)
        if not found:
            known_group(admin, group)
    if as_json:
        for one in found:
            print_json({**describe(one), "topic": one.topic, "group": group})
    else:
        print_messages(found, as_json=False)
    if not found:
        click.echo(f"metaq: the group {group} has no dead letters", err=True)
    return 0 if found else FAILED


def ids_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--id``, for some dead letters instead of all."""
    text = "Only the one with this id; may be repeated.  [default: all]"
    return click.option("--id", "ids", multiple=True, metavar="ID", help=text)(command)


def chosen(admin: Admin, group: str, ids: Sequence[str]) -> list[ReceivedMessage]:
    """Return a group's dead letters with these ids, or all; end the command when it has none and is not known."""
    letters = [one for one in admin.dead_letters(group) if not ids or one.id in ids]
    if not letters:
        known_group(admin, group)
    return letters


def conclude(group: str, ids: Sequence[str], letters: Sequence[ReceivedMessage], done: str, *, yes: bool, as_json: bool) -> int:
    """Say what was done, or would be, and which ids nothing has; return the exit code."""
    missing = sorted(set(ids) - {letter.id for letter in letters})
    if missing:
        click.echo(f"metaq: no dead letter of the group {group} has the id {', '.join(missing)}", err=True)
    if not as_json:
        if letters:
            click.echo(done)
        elif not missing:
            click.echo(f"metaq: the group {group} has no dead letters", err=True)
        if letters and not yes:
            click.echo(NOTHING_CHANGED, err=True)
    return FAILED if missing or not letters else 0


# -- replay -----------------------------------------------------------------------------------------------------------


@dlq.command(
    epilog=examples(
        "metaq dlq replay billing                      # what would be sent",
        "metaq dlq replay billing --yes",
        "metaq dlq replay billing --id 7F0000010B2C18B4AAC20000D8A50000 --to group --yes",
    )
)
@click.argument("group")
@ids_option
@click.option("--to", "target", type=click.Choice([TOPIC, GROUP]), default=TOPIC, show_default=True, help="Where to send them.")
@click.option("--again", is_flag=True, help="Also those that were already sent to their topic again.")
@yes_option
@registry_option
@json_option
def replay(group: str, ids: tuple[str, ...], target: str, again: bool, yes: bool, registry: str, as_json: bool) -> int:
    """Send GROUP's dead letters again; they also remain dead letters.

    By default they are sent to the topic that they came from, as new messages that all groups of the topic receive. The old
    id is one of their keys, so that `metaq message query TOPIC --key ID` finds them, and their property DLQ_ORIGIN_MESSAGE_ID.
    With --to group they are sent to this group only, under new ids: a topic's window does not count them as duplicates.
    They go to the group's retry topic, which members that pull read. Consumers that lease never get them: they need --to topic.
    """
    sent = unsendable = 0
    with connect_registry(registry) as client, client.producer() as producer:
        admin = client.admin()
        letters = chosen(admin, group, ids)
        for letter in letters:
            before = times_sent(admin, letter) if target == TOPIC else None
            lost = target == TOPIC and before is None
            left_out = lost or bool(before and not again)
            new_id = None
            if yes and not left_out:
                new_id = admin.replay(group, letter).id if target == GROUP else send_again(producer, group, letter)
            sent += not left_out
            unsendable += lost
            report(letter, before, new_id, yes=yes, left_out=left_out, as_json=as_json)
    done = f"{'sent' if yes else 'would send'} {sent} of {len(letters)} dead letters again"
    code = conclude(group, ids, letters, done, yes=yes, as_json=as_json)
    return FAILED if unsendable else code


def times_sent(admin: Admin, letter: ReceivedMessage) -> int | None:
    """Return how often a dead letter was sent to its topic again; ``None`` when there is no such topic any more."""
    try:
        return len(admin.query_by_key(letter.topic, letter.id))
    except RouteNotFound as error:
        if error.reason is not RouteProblem.TOPIC_ABSENT:
            raise
        return None


def send_again(producer: Producer, group: str, letter: ReceivedMessage) -> str:
    """Send one dead letter to the topic that it came from. Return the id under which it goes."""
    if letter.topic == letter.queue.topic:
        raise BadRequest(f"{letter!r} does not say which topic it came from; use --to group")
    if letter.error is not None:
        raise BadRequest(f"{letter!r}: {letter.error}; --to group sends it on as it is stored")
    result = producer.send(
        letter.topic,
        letter.body,
        tag=letter.tag,
        keys=[*letter.keys, letter.id],
        properties=properties_again(letter, group),
        ordering_key=letter.properties.get(SHARDING_KEY),
        priority=letter.priority,
    )
    return result.id


def report(
    letter: ReceivedMessage, before: int | None, new_id: str | None, *, yes: bool, left_out: bool, as_json: bool
) -> None:
    """Print one line about one dead letter; ``before`` says how often it was sent to its topic, if that was asked."""
    if as_json:
        row: dict[str, Any] = {"id": letter.id, "topic": letter.topic, "sent_before": before, "sent": yes and not left_out}
        print_json({**row, "new_id": new_id})
        return
    what = f"{letter.id} to {letter.topic}"
    if left_out:
        reason = "there is no such topic any more; --to group sends it to its group"
        if before is not None:
            reason = f"it was sent again {before} time{'s' if before > 1 else ''} before; --again sends it"
        click.echo(f"left out {what}: {reason}")
    elif yes:
        click.echo(f"sent {what} as {new_id}")
    else:
        click.echo(f"would send {what}")


# -- discard ----------------------------------------------------------------------------------------------------------


@dlq.command(
    epilog=examples(
        "metaq dlq discard billing                     # what would be discarded",
        "metaq dlq discard billing --yes",
        "metaq dlq discard billing --id 7F0000010B2C18B4AAC20000D8A50000 --yes",
    )
)
@click.argument("group")
@ids_option
@yes_option
@registry_option
@json_option
def discard(group: str, ids: tuple[str, ...], yes: bool, registry: str, as_json: bool) -> int:
    """Discard GROUP's dead letters: nothing shows, counts or sends them again any more.

    All that the group has now are discarded, and none that comes meanwhile. Nothing brings them back; keep those that somebody
    may need with `metaq dlq show GROUP --count N --json`.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        letters = chosen(admin, group, ids)
        if yes:
            admin.discard_dead_letters(letters)
    for letter in letters:
        if as_json:
            print_json({"id": letter.id, "topic": letter.topic, "discarded": yes})
        else:
            click.echo(f"{'discarded' if yes else 'would discard'} {letter.id} of {letter.topic}")
    done = f"{'discarded' if yes else 'would discard'} {len(letters)} dead letters"
    return conclude(group, ids, letters, done, yes=yes, as_json=as_json)
