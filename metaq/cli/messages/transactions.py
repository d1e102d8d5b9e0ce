"""``metaq tx``: undecided transactions, and decisions in place of the program that should make them."""

import contextlib
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

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
from metaq.cli.numbers import IntRange
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import Row, print_record, print_rows
from metaq.client.admin.transactions import TransactionAdmin
from metaq.client.admin.views import BranchView, BrokerView
from metaq.errors import BadRequest
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.remoting.undecided import Branch, BranchMessage, HalfRow, UndecidedState
from metaq.tx.states import Decision

DEFAULT_COUNT: Final = 1000
KEY_EXAMPLE: Final = "XID:1:6f72646572:6d65746171:billing"

HEURISTIC_WARNING: Final = """\
This is a heuristic decision. The transaction's other participants, such as a database, do not follow it. Decide only a branch
that its transaction manager will never decide, and in the way that the others have ended. If the manager decides after all, it
receives what was done here (HEURCOM or HEURRB), until it or metaq tx forget forgets the branch."""
HALF_WARNING: Final = """\
This decides instead of the producers, which know whether their local transaction succeeded; their later decision is ignored.
Decide only a message that they will never decide, and in the way that their transaction ended."""
FORGET_WARNING: Final = """\
The transaction manager will no longer learn that an operator has decided; it receives NOTA, as for any branch that is gone."""


class LocatedTransaction(NamedTuple):
    """An undecided transaction, and the broker that has it."""

    broker: BrokerView
    what: BranchView | HalfRow


@click.group(cls=Suggesting)
def tx() -> None:
    """Show undecided transactions, and decide them."""


# -- looking ----------------------------------------------------------------------------------------------------------


@tx.command("list", epilog=examples("metaq tx list", "metaq tx list --count 100000 --json"))
@click.option("--count", type=IntRange(1), default=DEFAULT_COUNT, show_default=True, metavar="N", help="Show at most N.")
@registry_option
@json_option
def list_undecided(count: int, registry: str, as_json: bool) -> None:
    """List XA branches that are prepared or were decided by operators, and undecided transactional messages."""
    with connect_registry(registry) as client:
        admin = client.admin()
        masters, transactions = admin.masters(), admin.transactions()
        all_branches = (branch_row(each, one) for each in masters for one in transactions.branches(each.address))
        all_halves = (half_row(each, one) for each in masters for one in transactions.halves(each.address))
        branches, halves = list(islice(all_branches, count)), list(islice(all_halves, count))
    for rows in (branches, halves):
        if rows:
            print_rows(rows, as_json=as_json, hidden=("kind", "partition", "due_ms"))
    if max(len(branches), len(halves)) >= count:
        click.echo(f"there may be more; this shows {count} of each kind (--count)", err=True)
    if not branches and not halves and not as_json:
        click.echo("there are no undecided transactions", err=True)


def branch_row(broker: BrokerView, branch: Branch) -> Row:
    """Return a branch as one row."""
    return {
        "kind": "branch",
        "broker": broker.name,
        "key": branch.key,
        "state": branch.state if branch.outcome is None else f"{branch.state} {branch.outcome}",
        "since_ms": branch.since_ms,
        "age_s": None if branch.since_ms is None else age_s(branch.since_ms),
        "messages": branch.messages,
        "bytes": branch.size,
    }


def half_row(broker: BrokerView, half: HalfRow) -> Row:
    """Return a transactional message as one row."""
    return {
        "kind": "half",
        "broker": broker.name,
        "id": half.message_id,
        "offset_id": half.offset_id,
        "topic": half.topic,
        "partition": half.partition,
        "group": half.group,
        "since_ms": half.since_ms,
        "age_s": age_s(half.since_ms),
        "checks": half.checks,
        "due_ms": half.due_ms,
        "bytes": half.size,
    }


def age_s(since_ms: int) -> int:
    """Return an age in seconds, by the clock here."""
    return max(0, time.time_ns() // 1_000_000 - since_ms) // 1000


@tx.command(epilog=examples(f"metaq tx show {KEY_EXAMPLE}", "metaq tx show 7F0000010B2C18B4AAC20000D8A50000"))
@click.argument("key", metavar="KEY|ID")
@registry_option
@json_option
def show(key: str, registry: str, as_json: bool) -> int:
    """Show the branch KEY with its messages, or the transactional message ID."""
    with connect_registry(registry) as client:
        admin = client.admin()
        found = list(find(admin.transactions(), admin.masters(), key))
    for broker, what in found:
        if isinstance(what, HalfRow):
            print_record(half_row(broker, what), as_json=as_json)
            continue
        row, messages = branch_row(broker, what.branch), [message_row(each) for each in what.messages]
        if as_json:
            print_json({**row, "message_list": messages, "problem": what.problem})
            continue
        print_record({name: value for name, value in row.items() if name != "kind"}, as_json=False)
        if messages:
            click.echo()
            print_rows(messages, as_json=False)
        if what.problem is not None:
            click.echo(f"metaq: {what.problem}; it can only be rolled back", err=True)
        elif len(messages) < (what.branch.messages or 0):
            click.echo(f"these are the first {len(messages)} of {what.branch.messages} messages", err=True)
    return 0 if found else missing(key)


def message_row(message: BranchMessage) -> Row:
    """Return a message of a branch as one row."""
    return {
        "topic": message.topic,
        "partition": message.partition,
        "id": message.message_id,
        "tag": message.attribute,
        "born_ms": message.born_ms,
        "bytes": message.size,
    }


def find(transactions: TransactionAdmin, masters: list[BrokerView], key: str) -> Iterator[LocatedTransaction]:
    """Yield the undecided transactions with this key or id: on one broker, unless a program uses one key with several."""
    for broker in masters:
        address = broker.address
        what = transactions.branch(address, key) if ":" in key else find_half(transactions, address, key)
        if what is not None:
            yield LocatedTransaction(broker, what)


def find_half(transactions: TransactionAdmin, address: str, message_id: str) -> HalfRow | None:
    """Return a transactional message by the broker's id or the sender's.

    Brokers cannot look up the sender's id, so for that the list is searched.
    """
    with contextlib.suppress(BadRequest):
        decode_offset_id(message_id)
        half = transactions.half(address, message_id)
        if half is not None:
            return half
    return next((half for half in transactions.halves(address) if half.message_id == message_id), None)


def missing(key: str) -> int:
    """Report that there is no such transaction. Return the exit code."""
    click.echo(f"metaq: no broker has an undecided transaction {key}; metaq tx list shows them", err=True)
    return FAILED


# -- deciding ---------------------------------------------------------------------------------------------------------


@tx.command(epilog=examples(f"metaq tx commit {KEY_EXAMPLE}      # what would be done", f"metaq tx commit {KEY_EXAMPLE} --yes"))
@click.argument("key", metavar="KEY|ID")
@yes_option
@registry_option
@json_option
def commit(key: str, yes: bool, registry: str, as_json: bool) -> int:
    """Deliver the messages of the prepared branch KEY, or the transactional message ID.

    For a branch this is a heuristic decision: the other participants of its transaction do not follow it.
    """
    return decide(key, Decision.COMMIT, yes=yes, registry=registry, as_json=as_json)


@tx.command(
    epilog=examples(f"metaq tx rollback {KEY_EXAMPLE}      # what would be done", f"metaq tx rollback {KEY_EXAMPLE} --yes")
)
@click.argument("key", metavar="KEY|ID")
@yes_option
@registry_option
@json_option
def rollback(key: str, yes: bool, registry: str, as_json: bool) -> int:
    """Drop the messages of the prepared branch KEY, or the transactional message ID.

    For a branch this is a heuristic decision: the other participants of its transaction do not follow it.
    """
    return decide(key, Decision.ROLLBACK, yes=yes, registry=registry, as_json=as_json)


@tx.command(epilog=examples(f"metaq tx forget {KEY_EXAMPLE} --yes"))
@click.argument("key")
@yes_option
@registry_option
@json_option
def forget(key: str, yes: bool, registry: str, as_json: bool) -> int:
    """Forget an operator's decision on the branch KEY, if its transaction manager never will."""
    with connect_registry(registry) as client:
        admin = client.admin()
        transactions = admin.transactions()
        found = list(find(transactions, admin.masters(), key)) if ":" in key else []
        decided = [
            one for one in found if isinstance(one.what, BranchView) and one.what.branch.state == UndecidedState.HEURISTIC
        ]
        for broker, _ in decided:
            if yes:
                transactions.forget(broker.address, key)
    if not decided:
        click.echo(f"metaq: no operator has decided a branch {key}", err=True)
        return FAILED
    tell(decided, key, "forget", FORGET_WARNING, yes=yes, as_json=as_json)
    return 0


def decide(key: str, outcome: Decision, *, yes: bool, registry: str, as_json: bool) -> int:
    """Decide the transactions with this key or id, or print what that would do. Return the exit code."""
    with connect_registry(registry) as client:
        admin = client.admin()
        transactions = admin.transactions()
        found = list(find(transactions, admin.masters(), key))
        for _, what in found:
            if isinstance(what, BranchView) and what.branch.state == UndecidedState.HEURISTIC:
                click.echo(f"metaq: an operator has already decided {key}: {what.branch.outcome}", err=True)
                return FAILED
        for broker, what in found if yes else ():
            if isinstance(what, HalfRow):
                transactions.decide_half(broker.address, what, commit=outcome is Decision.COMMIT)
            else:
                transactions.decide(broker.address, key, outcome)
    if not found:
        return missing(key)
    warning = HALF_WARNING if isinstance(found[0].what, HalfRow) else HEURISTIC_WARNING
    tell(found, key, outcome.value, warning, yes=yes, as_json=as_json)
    return 0


_DONE: Final = {"commit": "committed", "rollback": "rolled back", "forget": "forgot"}
_WOULD: Final = {"commit": "would commit", "rollback": "would roll back", "forget": "would forget"}


def tell(found: list[LocatedTransaction], key: str, action: str, warning: str, *, yes: bool, as_json: bool) -> None:
    """Print one line about each transaction and, when it is not decided yet, what the decision means."""
    for broker, what in found:
        row = half_row(broker, what) if isinstance(what, HalfRow) else branch_row(broker, what.branch)
        if as_json:
            print_json({**row, "action": action, "applied": yes})
        else:
            click.echo(f"{_DONE[action] if yes else _WOULD[action]} {key} on {broker.name}{_size(what)}")
    if not yes:
        click.echo(warning, err=True)
        click.echo(NOTHING_CHANGED, err=True)


def _size(what: BranchView | HalfRow) -> str:
    if isinstance(what, HalfRow):
        return f": one message to {what.topic}"
    count = what.branch.messages
    return "" if count is None else f": {count} message{'' if count == 1 else 's'}"
