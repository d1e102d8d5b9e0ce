"""``metaq cluster``: the brokers that a registry knows, and the clients that are connected to them."""

from collections.abc import Iterable, Mapping
from typing import Any

import click

from metaq.cli.cluster.addslave import add_slave
from metaq.cli.cluster.replicas import demote, handover, promote, status
from metaq.cli.common import FAILED, SYSTEM_GROUP, connect_registry, examples, json_option, print_json, registry_option
from metaq.cli.messages.topics import is_of_users
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import Row, print_record, print_rows
from metaq.client import Admin
from metaq.client.admin.views import BrokerView
from metaq.errors import ClientError
from metaq.protocol.remoting.codes import MASTER


@click.group(cls=Suggesting)
def cluster() -> None:
    """Show clusters, brokers, replicas and connected clients; change which replica is master."""


for command in (status, promote, demote, handover, add_slave):
    cluster.add_command(command)


@cluster.command("list", epilog=examples("metaq cluster list"))
@registry_option
@json_option
def list_clusters(registry: str, as_json: bool) -> None:
    """List the clusters."""
    with connect_registry(registry) as client:
        brokers = client.admin().brokers()
    print_rows([cluster_row(name, brokers) for name in clusters(brokers)], as_json=as_json)
    if not brokers and not as_json:
        click.echo("no broker is registered", err=True)


def clusters(brokers: Iterable[BrokerView]) -> list[str]:
    """Return the names of the clusters, each once."""
    return sorted({broker.cluster for broker in brokers})


def cluster_row(name: str, brokers: Iterable[BrokerView]) -> dict[str, Any]:
    """Return a cluster as one row."""
    own = [broker for broker in brokers if broker.cluster == name]
    masters = sorted(broker.name for broker in own if broker.broker_id == MASTER)
    return {"cluster": name, "masters": masters, "replicas": len(own) - len(masters)}


@cluster.command(epilog=examples("metaq cluster show", "metaq cluster show DefaultCluster --json"))
@click.argument("name", required=False, metavar="[CLUSTER]")
@registry_option
@json_option
def show(name: str | None, registry: str, as_json: bool) -> int:
    """Show a cluster, or all of them together: brokers, and how many topics, groups and clients there are."""
    with connect_registry(registry) as client:
        admin = client.admin()
        brokers = [broker for broker in admin.brokers() if name in (None, broker.cluster)]
        if not brokers:
            absent = "no broker is registered" if name is None else f"there is no cluster {name}; metaq cluster list shows them"
            click.echo(f"metaq: {absent}", err=True)
            return FAILED
        system = set(admin.system_topics())
        row = {
            "clusters": clusters(brokers),
            "brokers": len(brokers),
            "topics": sum(is_of_users(topic, system) for topic in admin.topics()),
            "groups": sum(not SYSTEM_GROUP.fullmatch(group.name) for group in admin.groups()),
            **counted(client_rows(admin)),
        }
        rows = [broker_row(admin, broker) for broker in brokers]
    if as_json:
        print_json({**row, "broker_list": rows})
        return 0
    print_record(row, as_json=False)
    click.echo()
    print_rows(rows, as_json=False)
    return 0


def counted(rows: Iterable[Row]) -> dict[str, int]:
    """Return how many producers, consumers and clients there are."""
    ids = {kind: {row["client_id"] for row in rows if row["kind"] == kind} for kind in ("producer", "consumer")}
    return {"producers": len(ids["producer"]), "consumers": len(ids["consumer"]), "clients": len(set.union(*ids.values()))}


@cluster.command(epilog=examples("metaq cluster brokers", "metaq cluster brokers --json"))
@registry_option
@json_option
def brokers(registry: str, as_json: bool) -> None:
    """List the broker processes, and their present load."""
    with connect_registry(registry) as client:
        admin = client.admin()
        rows = [broker_row(admin, broker) for broker in admin.brokers()]
    print_rows(rows, as_json=as_json)
    if not rows and not as_json:
        click.echo("no broker is registered", err=True)


def broker_row(admin: Admin, broker: BrokerView) -> dict[str, Any]:
    """Return a broker as one row; for one that does not answer, with the reason."""
    try:
        info: Mapping[str, str] = admin.broker_info(broker.address)
        state = "answers"
    except ClientError as error:
        info, state = {}, str(error)
    ratio = info.get("commitLogDiskRatio")
    return {
        "cluster": broker.cluster,
        "broker": broker.name,
        "id": broker.broker_id,
        "address": broker.address,
        "version": info.get("metaqVersion", info.get("brokerVersionDesc")),
        "put_per_s": first_number(info, "putTps"),
        "got_per_s": first_number(info, "getTransferredTps", "getTransferedTps"),
        "put_today": today(info, "msgPutTotal"),
        "got_today": today(info, "msgGetTotal"),
        "disk": None if ratio is None else f"{float(ratio):.0%}",
        "state": state,
    }


def first_number(info: Mapping[str, str], *names: str) -> float | None:
    """Return the first of a broker's averages, that of the last ten seconds; the first of ``names`` that it reports counts."""
    for name in names:
        words = info.get(name, "").split()
        if words:
            return round(float(words[0]), 1)
    return None


def today(info: Mapping[str, str], name: str) -> int | None:
    """Return the number of messages since midnight."""
    if f"{name}TodayNow" not in info:
        return None
    return int(info[f"{name}TodayNow"]) - int(info.get(f"{name}TodayMorning", "0"))


@cluster.command(epilog=examples("metaq cluster clients", "metaq cluster clients --json"))
@registry_option
@json_option
def clients(registry: str, as_json: bool) -> None:
    """List the connected producers and consumers by group."""
    with connect_registry(registry) as client:
        rows = client_rows(client.admin())
    print_rows(rows, as_json=as_json)
    if not rows and not as_json:
        click.echo("no client is connected", err=True)


def client_rows(admin: Admin) -> list[Row]:
    """Return a row for each client in each of its groups."""
    found = [("producer", group, member) for group, members in admin.producers().items() for member in members]
    for group in admin.groups():
        online = admin.members(group.name)
        found += [("consumer", group.name, member) for member in (() if online is None else online.members)]
    return [{"kind": kind, "group": group, **member._asdict()} for kind, group, member in found]
