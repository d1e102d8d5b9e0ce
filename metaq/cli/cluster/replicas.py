"""``metaq cluster status``, ``promote``, ``demote``, ``handover``: the state of replicas, and changes of master."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import click

from metaq.address import Address
from metaq.cli.common import (
    FAILED,
    NOTHING_CHANGED,
    AddressParameter,
    connect_registry,
    examples,
    json_option,
    registry_option,
    yes_option,
)
from metaq.cli.numbers import IntRange
from metaq.cli.tables import Row, print_record, print_rows
from metaq.client import Admin
from metaq.client.admin.replicas import ReplicaAdmin
from metaq.client.admin.views import BrokerView, ReplicaView, SlaveView
from metaq.diagnosis.rolechanges import NOT_IN_SYNC, ReplicaStanding, demotion_warnings, promotion_warnings
from metaq.errors import ClientError, Refused
from metaq.protocol.remoting.codes import MASTER

CHANGE_S: Final = 60.0
"""Longest wait for a change of roles: the store is closed and opened anew, which recovers its newest part."""
POLL_S: Final = 0.2


class ReplicaPlace(NamedTuple):
    """A replica that a registry knows, or that was named by its address."""

    broker: BrokerView
    view: ReplicaView | None
    """``None`` when it takes no slaves, or did not answer."""
    error: str | None = None
    """Why it did not answer."""

    @property
    def is_master(self) -> bool:
        """True when it takes messages."""
        return self.view is not None and self.view.role == "master"

    @property
    def leads(self) -> bool:
        """True when it takes messages, or was elected and will take them once its disk has room."""
        return self.is_master or (self.view is not None and self.view.leads)

    @property
    def is_in_sync(self) -> bool:
        """True when it is in sync, or was when it last heard from its master."""
        return self.view is not None and self.view.replica in self.view.in_sync

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """A sort key that is higher for a better master."""
        view = self.view
        return (False, False, 0, 0) if view is None else (view.suspect is None, self.is_in_sync, view.epoch, view.end)

    @property
    def standing(self) -> ReplicaStanding:
        """The same, as warnings are made of it."""
        view = self.view
        if view is None:
            return ReplicaStanding(str(self), self.error)
        log = {"epoch": view.epoch, "end": view.end, "master_end": view.master_end}
        return ReplicaStanding(str(self), None, self.is_master, self.is_in_sync, view.suspect, **log)

    def __str__(self) -> str:
        number = "" if self.view is None else f"replica {self.view.replica} of "
        return f"{number}{self.broker.name} at {self.broker.address}"


def place_of(replicas: ReplicaAdmin, broker: BrokerView) -> ReplicaPlace:
    """Ask one replica for its state."""
    try:
        return ReplicaPlace(broker, replicas.status(broker.address))
    except ClientError as error:
        return ReplicaPlace(broker, None, str(error))


def places_of(admin: Admin, name: str | None = None) -> list[ReplicaPlace]:
    """Return all replicas that the registry knows, of one broker or of all."""
    replicas = admin.replicas()
    return [place_of(replicas, broker) for broker in admin.brokers() if name in (None, broker.name)]


# -- looking ----------------------------------------------------------------------------------------------------------


@click.command(epilog=examples("metaq cluster status", "metaq cluster status orders --json"))
@click.argument("name", required=False, metavar="[BROKER]")
@registry_option
@json_option
def status(name: str | None, registry: str, as_json: bool) -> int:
    """Show the replicas of a broker, or of all brokers: their roles, epochs and positions, and which are in sync."""
    with connect_registry(registry) as client:
        places = places_of(client.admin(), name)
    print_rows(status_rows(places), as_json=as_json, hidden=("durable_end", "min_in_sync"))
    if not places:
        click.echo(
            f"metaq: no broker {name} is registered; metaq cluster list shows the brokers"
            if name
            else "no broker is registered",
            err=True,
        )
        return FAILED if name else 0
    return 0


def status_rows(places: Iterable[ReplicaPlace]) -> list[Row]:
    """Return a row for each replica, including slaves that follow a master and are not registered."""
    rows = []
    listed = list(places)
    known = {(place.broker.name, place.view.replica) for place in listed if place.view is not None}
    for place in listed:
        rows.append(status_row(place, listed))
        if place.view is not None:
            strangers = [slave for slave in place.view.slaves if (place.broker.name, slave.replica) not in known]
            rows += [stranger_row(place.broker, slave) for slave in strangers]
    return rows


def status_row(place: ReplicaPlace, places: Iterable[ReplicaPlace]) -> Row:
    """Return a replica as one row. Only its master knows how far a slave lags."""
    broker, view = place.broker, place.view
    if view is None:
        role, state = ("master" if broker.broker_id == MASTER else "slave"), place.error or "takes no slaves"
        return _row(broker, broker.broker_id or None, role, broker.address, state)
    masters = [other for other in places if other.is_master and other.broker.name == broker.name]
    seen = [slave for other in masters if other.view for slave in other.view.slaves if slave.replica == view.replica]
    state = "answers" if place.is_master else _state_of_slave(view)
    row = _row(broker, view.replica, view.role, broker.address, state)
    row.update(epoch=view.epoch, end=view.end, durable_end=view.durable_end, readable_end=view.readable_end)
    row.update(in_sync=seen[0].in_sync if seen else place.is_in_sync)
    if place.is_master:
        row.update(in_sync_set=list(view.in_sync), min_in_sync=view.min_in_sync)
    elif seen:
        row.update(_lag(seen[0]))
    else:
        row.update(lag_bytes=max(0, view.master_end - view.end))
    return row


def _state_of_slave(view: ReplicaView) -> str:
    if view.problem:
        return view.problem
    if view.suspect:
        return f"suspect: {view.suspect}"
    return f"follows {view.master or 'nobody'}"


def stranger_row(broker: BrokerView, slave: SlaveView) -> Row:
    """Return a row for a slave that only its master knows."""
    row = _row(broker, slave.replica, "slave", slave.text, "not registered")
    row.update(end=slave.held_end, in_sync=slave.in_sync, **_lag(slave))
    return row


def _lag(slave: SlaveView) -> dict[str, Any]:
    return {"lag_bytes": slave.lag_bytes, "lag_s": None if slave.lag_ms < 0 else slave.lag_ms / 1000}


def _row(broker: BrokerView, replica: int | None, role: str, address: str, state: str) -> dict[str, Any]:
    unknown = ("epoch", "end", "durable_end", "readable_end", "lag_bytes", "lag_s", "in_sync", "in_sync_set", "min_in_sync")
    first = {"broker": broker.name, "replica": replica, "role": role, "address": address}
    return {**first, **dict.fromkeys(unknown), "state": state}


# -- changing roles ---------------------------------------------------------------------------------------------------


def at_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--at``."""
    text = "The replica's own address, when the registry does not know it.  [default: the registry is asked]"
    return click.option("--at", "at", type=AddressParameter(), help=text)(command)


def replica_option(name: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an option for the number of a replica."""
    return click.option(name, "replica", type=IntRange(1), metavar="N", help=text)


def known_places(admin: Admin, name: str, at: Address | None) -> list[ReplicaPlace]:
    """Return the replicas of a broker to choose from: those of the registry, or the one at an address."""
    if at is None:
        places = places_of(admin, name)
        if not places:
            raise click.BadParameter(f"no replica of {name} is registered; give its address with --at HOST:PORT")
        return places
    address = str(at)
    identity = admin.identity(address)
    if identity.name != name:
        raise click.BadParameter(f"{identity.name or 'a registry'} answers at {address}, not {name}")
    return [place_of(admin.replicas(), BrokerView("", name, MASTER, address))]


def chosen(places: Iterable[ReplicaPlace], replica: int | None, what: str) -> ReplicaPlace:
    """Return the replica with this number, or else the one with the highest rank."""
    fits = [place for place in places if place.view is not None and replica in (None, place.view.replica)]
    if not fits:
        which = what if replica is None else f"replica {replica} is none of them: {what}"
        raise click.UsageError(f"{which}; metaq cluster status shows the replicas, and why one does not")
    return max(fits, key=lambda place: place.rank)


def show_change(place: ReplicaPlace, change: str, warnings: Iterable[str], *, yes: bool, as_json: bool) -> None:
    """Print the change that is made, or would be."""
    view = place.view
    assert view is not None
    row = {"broker": place.broker.name, "replica": view.replica, "address": place.broker.address, "change": change}
    row.update(epoch=view.epoch, end=view.end, master_end=view.master_end, in_sync=place.is_in_sync, done=yes)
    print_record(row, as_json=as_json)
    for warning in warnings:
        click.echo(warning, err=True)
    if not yes:
        click.echo(NOTHING_CHANGED, err=True)


@contextmanager
def advising(advice: str, *, when: bool) -> Iterator[None]:
    """Add to a refusal what its text, which other fronts show as well, does not name: the option or command that helps."""
    try:
        yield
    except Refused as error:
        if when:
            error.add_note(advice)
        raise


def wait_role(replicas: ReplicaAdmin, place: ReplicaPlace, role: str) -> int:
    """Wait until a replica has a role, and return the exit code. It does not answer while its role changes."""
    deadline, problem = time.monotonic() + CHANGE_S, ""
    while time.monotonic() < deadline:
        now = place_of(replicas, place.broker)
        if now.view is not None and now.view.role == role:
            click.echo(f"{now} is {role} now, epoch {now.view.epoch}", err=True)
            return 0
        problem = now.error or "its role has not changed yet"
        time.sleep(POLL_S)
    click.echo(f"metaq: {place} is not {role} after {CHANGE_S:.0f} s: {problem}; metaq cluster status shows more", err=True)
    return FAILED


@click.command(
    epilog=examples(
        "metaq cluster promote orders      # what would be done",
        "metaq cluster promote orders --replica 2 --yes",
        "metaq cluster promote orders --at 10.0.0.2:10911 --yes",
    )
)
@click.argument("name", metavar="BROKER")
@replica_option("--replica", "Its number.  [default: the slave that was in sync and has most]")
@at_option
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Also promote a replica that may lack acknowledged messages; these are then lost for good.",
)
@yes_option
@registry_option
@json_option
def promote(
    name: str, replica: int | None, at: Address | None, accept_loss: bool, yes: bool, registry: str, as_json: bool
) -> int:
    """Make a slave of BROKER the master, after its master is lost.

    Only you can know that the old master is gone for good, and not just out of reach: with two masters, what the old one
    still acknowledges is lost.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        places = known_places(admin, name, at)
        slaves = [place for place in places if not place.is_master]
        place = chosen(slaves, replica, f"no slave of {name} answers")
        others = [other.standing for other in places if other is not place and (other.view or other.error)]
        warnings = promotion_warnings(place.standing, others, elects=place.view is not None and place.view.elects)
        show_change(place, "slave to master", warnings, yes=yes, as_json=as_json)
        if not yes:
            return 0
        with advising("a loss is accepted with --accept-loss", when=not accept_loss):
            admin.replicas().promote(place.broker.address, accept_loss=accept_loss)
        return wait_role(admin.replicas(), place, "master")


@click.command(
    epilog=examples(
        "metaq cluster demote orders --at 10.0.0.1:10911",
        "metaq cluster demote orders --replica 1 --master 10.0.0.2:10912 --yes",
    )
)
@click.argument("name", metavar="BROKER")
@replica_option("--replica", "Its number.  [default: the master; of two the one of the older epoch]")
@at_option
@click.option("--master", "master", metavar="HOST:PORT", help="The master to follow.  [default: the other master]")
@yes_option
@registry_option
@json_option
def demote(
    name: str,
    replica: int | None,
    at: Address | None,
    master: str | None,
    yes: bool,
    registry: str,
    as_json: bool,
) -> int:
    """Make a replica of BROKER the slave of another one that has taken its place.

    --master is the replication_listen of the other replica, at an address that others can reach.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        places = known_places(admin, name, at)
        fits = sorted((place for place in places if place.is_master), key=lambda place: place.view.epoch if place.view else 0)
        place = chosen(fits[:1] if replica is None else fits, replica, f"no master of {name} answers")
        known = places if at is None else [] if master else places_of(admin, name)
        others = [other for other in known if other.is_master and not same(other, place)]
        following = master or next((other.view.replication for other in others if other.view), None)
        if following is None:
            raise click.BadParameter(f"no other replica of {name} is master; give the one to follow with --master HOST:PORT")
        warnings = demotion_warnings(has_other=bool(others))
        show_change(place, f"master to slave of {following}", warnings, yes=yes, as_json=as_json)
        if not yes:
            return 0
        with advising(f"metaq cluster handover {name} hands over", when=place.view is not None and place.view.elects):
            admin.replicas().demote(place.broker.address, following)
        return wait_role(admin.replicas(), place, "slave")


def same(one: ReplicaPlace, other: ReplicaPlace) -> bool:
    """Return whether two places are one replica."""
    return one.view is not None and other.view is not None and one.view.replica == other.view.replica


@click.command(epilog=examples("metaq cluster handover orders --to 2", "metaq cluster handover orders --to 2 --yes"))
@click.argument("name", metavar="BROKER")
@replica_option("--to", "Number of the slave that becomes master.  [default: the one in sync that lags least]")
@yes_option
@registry_option
@json_option
def handover(name: str, replica: int | None, yes: bool, registry: str, as_json: bool) -> int:
    """Make a slave of BROKER the master while the master runs, without losing or refusing a message."""
    with connect_registry(registry) as client:
        admin = client.admin()
        places = known_places(admin, name, None)
        masters = [place for place in places if place.leads]
        master = chosen(masters, None, f"no master of {name} answers that takes slaves")
        place = chosen([other for other in places if not other.leads], replica, f"no slave of {name} answers")
        assert place.view is not None
        show_change(place, f"takes over from {master}", () if place.is_in_sync else (NOT_IN_SYNC,), yes=yes, as_json=as_json)
        if not yes:
            return 0
        admin.replicas().hand_over(master.broker.address, place.view.replica)
        return wait_role(admin.replicas(), place, "master")
