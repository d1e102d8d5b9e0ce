"""``metaq cluster add-slave``: the command that starts a new slave, and a wait until it is in sync."""

import shlex
import time
from collections.abc import Collection, Mapping
from typing import Final

import click

from metaq.cli.cluster.replicas import ReplicaPlace, chosen, known_places, places_of, replica_option
from metaq.cli.common import FAILED, connect_registry, examples, json_option, print_json, registry_option
from metaq.client import Admin
from metaq.config import FIELDS, Settings
from metaq.errors import ClientError
from metaq.fields import plain
from metaq.protocol.remoting.adminbodies import decode_settings, encode_settings

MIB: Final = 1024**2
LOOK_S: Final = 0.5

REFUSED_WITHOUT: Final = ("cluster_name", "broker_name", "broker_number", "segment_bytes")
"""A master refuses a slave in which these differ."""
OF_EACH: Final = (
    "data",
    "listen",
    "remoting_listen",
    "registry_listen",
    "http_listen",
    "registries",
    "advertise",
    "allow_public",
    "tls_certificate",
    "tls_key",
    "role",
    "replica_number",
    "replication_listen",
    "master",
    "log_level",
    "broker_permission",
)
"""Settings that each replica has of its own. All others should be as on the master, whose place a slave may take."""


@click.command("add-slave", epilog=examples("metaq cluster add-slave orders", "metaq cluster add-slave orders --wait 3600"))
@click.argument("name", metavar="BROKER")
@replica_option("--replica", "Number of the new replica.  [default: the next that is free]")
@click.option("--data", default="data", show_default=True, metavar="DIR", help="Its data folder, empty or not yet created.")
@click.option(
    "--replication-listen",
    "listen",
    default="127.0.0.1:10912",
    show_default=True,
    metavar="HOST:PORT",
    help="Address at which slaves connect if it becomes master.",
)
@click.option("--wait", "wait_s", type=click.FloatRange(0), metavar="S", help="Then wait up to S seconds until it is in sync.")
@registry_option
@json_option
def add_slave(
    name: str, replica: int | None, data: str, listen: str, wait_s: float | None, registry: str, as_json: bool
) -> int:
    """Print the command that starts a new slave of BROKER, with all settings that must equal its master's.

    With --wait also show the progress of the copy. If settings of existing slaves differ from their master's, these are shown.
    """
    with connect_registry(registry) as client:
        admin = client.admin()
        places = known_places(admin, name, None)
        masters = [place for place in places if place.is_master]
        master = chosen(masters, None, f"no master of {name} with replication_listen answers")
        assert master.view is not None
        config = admin.broker_config(master.broker.address)
        taken = {1, master.view.replica, *(slave.replica for slave in master.view.slaves)}
        taken |= {place.view.replica for place in places if place.view is not None}
        number = replica or next(number for number in range(1, len(taken) + 2) if number not in taken)
        settings = {
            **shared(config),
            **({"role": "elected"} if master.view.elects else {"role": "slave", "master": master.view.replication}),
            **registered(config, admin.registries),
            "replica_number": str(number),
            "replication_listen": listen,
            "data": data,
        }
        command = ["metaq", "serve", *(part for key, value in settings.items() for part in option(key, value))]
        if as_json:
            print_json({"broker": name, "replica": number, "settings": settings, "command": command})
        else:
            click.echo(shlex.join(command))
        tell_differences(admin, config, [place for place in places if not place.is_master])
        return 0 if wait_s is None else wait_in_sync(admin, master, number, wait_s)


def option(setting: str, value: str) -> list[str]:
    """Return a setting with its value as ``metaq serve`` takes it."""
    name = setting.replace("_", "-")
    if FIELDS[setting].annotation is bool:
        return [f"--{name}" if value == "true" else f"--no-{name}"]
    return [f"--{name}", value]


def shared(config: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that a slave has to share with its master: those that are not at their defaults, and the names."""
    usual = decode_settings(
        encode_settings({name: value for name, value in plain(Settings()).items() if name not in {"topics", *OF_EACH}})
    )
    return {
        name: config[name]
        for name, value in usual.items()
        if name in config and (config[name] != value or name in REFUSED_WITHOUT)
    }


def registered(config: Mapping[str, str], registries: Collection[str]) -> dict[str, str]:
    """Return the setting by which a slave registers: nothing where its master runs a registry of its own beside ZooKeeper."""
    alone = config.get("zookeeper") and not config.get("registries")
    return {} if alone else {"registries": ";".join(registries)}


def differences(ours: Mapping[str, str], theirs: Mapping[str, str], but: Collection[str] = OF_EACH) -> list[str]:
    """Return the settings in which a slave differs from its master, as text."""
    names = [name for name in FIELDS if name in ours and name in theirs and name not in but]
    return [f"{name} is {theirs[name]}, not {ours[name]}" for name in names if ours[name] != theirs[name]]


def tell_differences(admin: Admin, config: Mapping[str, str], slaves: Collection[ReplicaPlace]) -> None:
    """Print how slaves that answer differ from their master's settings."""
    for place in slaves:
        if place.view is not None:
            for difference in differences(config, admin.broker_config(place.broker.address)):
                click.echo(f"{place}: {difference} as on its master", err=True)


def wait_in_sync(admin: Admin, master: ReplicaPlace, number: int, wait_s: float) -> int:
    """Print how far a slave is until it is in sync. Return the exit code."""
    end_s = time.monotonic() + wait_s
    told = ""
    while True:
        here, state = state_of(admin, master, number)
        if state != told:
            click.echo(state, err=True)
            told = state
        if here:
            return 0
        if time.monotonic() >= end_s:
            click.echo(f"metaq: replica {number} of {master.broker.name} is not in sync after {wait_s:g} s", err=True)
            return FAILED
        time.sleep(LOOK_S)


def state_of(admin: Admin, master: ReplicaPlace, number: int) -> tuple[bool, str]:
    """Return whether a replica is in sync, and a text that says how far it is."""
    try:
        view = admin.replicas().status(master.broker.address)
    except ClientError as error:
        return False, f"{master} does not answer: {error}"
    slave = next((slave for slave in view.slaves if slave.replica == number), None) if view is not None else None
    if slave is None:
        problems = [
            place.view.problem
            for place in places_of(admin, master.broker.name)
            if place.view is not None and place.view.replica == number and place.view.problem
        ]
        return False, f"replica {number} does not follow: {problems[0]}" if problems else f"replica {number} has not come yet"
    held = f"replica {number} holds {slave.held_end / MIB:.1f} of {(slave.held_end + slave.lag_bytes) / MIB:.1f} MiB"
    return slave.in_sync, f"{held}, {'in sync' if slave.in_sync else 'not yet in sync'}"
