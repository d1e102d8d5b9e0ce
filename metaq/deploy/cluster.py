"""``conf/cluster.yaml``: the machines, and the brokers and registries on each.

::

    package, keep_releases, start_deadline_s, admin    of the deployment
    settings: {durability: replica, …}                 of all brokers, named as in conf/broker.yaml
    ssh_user, folder, user, …                          of every host that says nothing else
    hosts:
      one:
        address: 10.0.0.1
        broker: {data: /var/lib/metaq, listen: …}      settings of the broker there
        registry: {…}                                  settings of the registry there

The settings are those of the broker itself (``metaq.config``), and are checked in the same way.
"""

import itertools
import json
import os.path
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

from metaq.address import LOOPBACK, Address, parse_address, parse_listen
from metaq.config import FIELDS, REGISTRY_SETTINGS, Settings, load
from metaq.configfile import read_yaml
from metaq.deploy.unit import ABSOLUTE_PATH
from metaq.errors import ConfigError
from metaq.fields import Problem, WrongFields, declare, declared, from_values
from metaq.protocol.remoting.codes import FAST_PORT_BELOW
from metaq.suggestions import did_you_mean

ELECTED: Final = "elected"

T = TypeVar("T")
Kind = Literal["broker", "registry"]
COMMANDS: Final[dict[Kind, str]] = {"registry": "registry", "broker": "serve"}
"""The command of each kind, in the order in which a host has them."""
ANY_HOST: Final = ("0.0.0.0", "::")  # noqa: S104 - not listened on

_NAMES: Final = "letters, digits and ._-"
# Paths and names go unquoted into units, shell commands and files of supervisor.
_FORMS: Final = {
    "address": (".+", "an address"),
    "python": (r"[\w./+-]+", "a command of letters, digits and ./+-_"),
    "folder": (ABSOLUTE_PATH, "an absolute path of letters, digits and ./+-_"),
    "user": (r"[\w.-]*", f"a name of {_NAMES}"),
}
"""What some settings of a host look like, and the words for it."""


def _kept(value: Any) -> Any:
    """Return a value as it is: it is checked where it is known what it belongs to."""
    return value


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """The settings of one machine, and how it is reached."""

    address: str = declare("", description="The address of the machine.")
    ssh_user: str = declare("root", description="The user who logs in.")
    ssh_port: int = declare(22, ge=1, le=65535, description="The port of SSH.")
    ssh_key: str = declare("", description="The file with the private key; by default SSH's own.")
    known_hosts: str = declare("", description="The file with the keys of machines; by default SSH's own.")
    python: str = declare("python3", description="The Python with which environments are made.")
    folder: str = declare("/opt/metaq", description="The folder of the releases.")
    user: str = declare("", description="The user who runs the services; by default the one who logs in.")
    processes: Literal["auto", "systemd", "supervisor"] = declare("auto", description="What keeps the services running.")
    broker: dict[str, Any] | None = declare(None, convert=_kept, description="The settings of the broker there.")
    registry: dict[str, Any] | None = declare(None, convert=_kept, description="The settings of the registry there.")

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _FORMS}
        wrong = [
            Problem((name,), f"needs {words}; it is {given[name] or 'not there'}")
            for name, (pattern, words) in _FORMS.items()
            if not re.fullmatch(pattern, given[name])
        ]
        if wrong:
            raise WrongFields(wrong)


OF_ONE_HOST: Final = ("address", "broker", "registry")


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The settings of the file, except those that all hosts have in common."""

    package: str = declare(".", description="What is installed: a source folder, or a wheel.")
    keep_releases: int = declare(3, ge=1, description="The releases that a host keeps.")
    start_deadline_s: float = declare(300, gt=0, description="Seconds in which a service must be ready.")
    admin: str = declare("", description="The user as whom services with users are asked.")
    settings: dict[str, Any] = declare({}, convert=_kept, description="The settings of all brokers.")
    hosts: dict[str, Any] = declare({}, convert=_kept, description="The machines by name.")

    def __post_init__(self) -> None:
        if not self.hosts:
            raise WrongFields([Problem(("hosts",), "needs at least one host")])
        wrong = [name for name in self.hosts if not re.fullmatch(r"[\w.-]+", name)]
        if wrong:
            raise WrongFields([Problem(("hosts", name), f"the name of a host has only {_NAMES}") for name in wrong])


@dataclass(frozen=True, eq=False)
class Service:
    """A broker or a registry on one of the hosts."""

    host: str
    kind: Kind
    given: Mapping[str, Any]
    """The settings that the file gives it."""
    settings: Settings
    admin: str
    """The user as whom fab asks it, when it has users."""

    def __str__(self) -> str:
        return f"{self.kind} on {self.host}"

    @property
    def where(self) -> str:
        """The key of its settings in the file."""
        return f"hosts.{self.host}.{self.kind}"

    @property
    def group(self) -> tuple[str, str]:
        """The group of replicas that it belongs to: names of cluster and broker."""
        return self.settings.cluster_name, self.settings.broker_name

    @property
    def has_replicas(self) -> bool:
        """True when it is a broker with replication: it may have slaves, or be one."""
        return self.kind == "broker" and self.settings.replication_listen != "none"

    @property
    def asked_at(self) -> str:
        """The HOST:PORT at which its own machine asks for its state."""
        name = "listen" if self.kind == "broker" else "registry_listen"
        return reachable(getattr(self.settings, name))

    @property
    def login(self) -> str:
        """The options for a command on its machine that logs in to it."""
        if not self.settings.users_file:
            return ""
        return f" --user {shlex.quote(self.admin)} --users-file {shlex.quote(self.settings.users_file)}"

    @property
    def registries(self) -> str:
        """The addresses at which a command on its machine looks up brokers."""
        return self.settings.registries or reachable(self.settings.registry_listen)

    def addresses(self) -> list[tuple[str, str, int]]:
        """Return setting, host and port of everything that it listens on, whether set in the file or by default."""
        names = [name for name in FIELDS if name.endswith("listen")]
        beside = "listen"
        if self.kind == "registry":
            names = [name for name in names if name in REGISTRY_SETTINGS]
            beside = "registry_listen"
        elif self.settings.registries:
            names.remove("registry_listen")
        found = []
        if not self.settings.http_listen:
            port = self._address_of(beside).port
            found.append((f"http_listen, the port above {beside}", LOOPBACK, port + 1))
        for name in names:
            value = str(getattr(self.settings, name))
            if value not in ("none", ""):
                host, port = self._address_of(name)
                found.append((name, host, port))
                if name == "remoting_listen":
                    found.append((f"{name}, the port {FAST_PORT_BELOW} below", host, port - FAST_PORT_BELOW))
        return found

    def _address_of(self, name: str) -> Address:
        """Return the address of a setting. ``ConfigError`` for port 0, too, which would be another port after every restart."""
        return parse_address(str(getattr(self.settings, name)), setting=f"{self.where}.{name}")

    def text(self) -> str:
        """Return its configuration file: YAML, in which every value is JSON, which YAML includes."""
        return "".join(f"{name}: {json.dumps(value)}\n" for name, value in self.given.items())


@dataclass(frozen=True, eq=False)
class Host:
    """A machine and its services, the registry first."""

    name: str
    settings: HostSettings
    services: tuple[Service, ...]


@dataclass(frozen=True, eq=False)
class Cluster:
    """All hosts and services that are deployed together."""

    settings: ClusterSettings
    hosts: tuple[Host, ...]

    @property
    def extras(self) -> str:
        """The extras of the package that the settings need."""
        services = [service for host in self.hosts for service in host.services]
        needed = []
        if any(service.kind == "broker" and service.settings.timer_engine == "rocksdict" for service in services):
            needed.append("timers")
        if any(service.settings.zookeeper for service in services):
            needed.append("zookeeper")
        return f"[{','.join(needed)}]" if needed else ""

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the file. ``ConfigError`` names host and key."""
        try:
            return cls._of({name: given.value for name, given in read_yaml(file).items()})
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> Self:
        common = {name: raw.pop(name) for name in declared(HostSettings) if name in raw and name not in OF_ONE_HOST}
        settings = _checked(ClusterSettings, raw, "")
        hosts = tuple(_host(name, common, given, settings) for name, given in settings.hosts.items())
        _check_machines(hosts)
        _check_replicas([service for host in hosts for service in host.services])
        return cls(settings, hosts)

    def only(self, names: str) -> tuple[Host, ...]:
        """Return the hosts with these names, which are separated by commas; all for an empty text. ``ConfigError``."""
        if not names:
            return self.hosts
        wanted = [name.strip() for name in names.split(",")]
        known = {host.name: host for host in self.hosts}
        for name in wanted:
            if name not in known:
                raise ConfigError(f"there is no host {name!r}; the hosts are {', '.join(known)}")
        return tuple(known[name] for name in wanted)


def normal_folder(path: str) -> str:
    """Return an absolute path as all paths are compared: ``normpath`` alone keeps two slashes at its beginning."""
    return os.path.normpath("/" + path.lstrip("/"))


def reachable(listen: str) -> str:
    """Return the address at which its own machine reaches a service that listens there."""
    host, port = parse_listen("listen", listen)
    return str(Address({"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host), port))  # noqa: S104 - not listened on


def installed(host: str, kind: Kind, text: str, admin: str) -> Service:
    """Return a service as its configuration file on the host defines it (``Service.text``).

    Settings that this version does not know are left out, as the file may be of another release. ``ConfigError`` for a bad
    value.
    """
    given = {name: json.loads(value) for name, _, value in (line.partition(": ") for line in text.splitlines())}
    names = _names(kind)
    known = {name: value for name, value in given.items() if name in names}
    return Service(host, kind, given, load(None, {}, known, names), admin)


def _names(kind: Kind) -> Collection[str]:
    return FIELDS if kind == "broker" else REGISTRY_SETTINGS


def _checked(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    try:
        return from_values(kind, values)
    except WrongFields as error:
        problems = []
        for place, reason in error.problems:
            name = ".".join(place)
            unknown = len(place) == 1 and name not in declared(kind)
            hint = did_you_mean(name, declared(kind)) if unknown else ""
            problems.append(f"{'.'.join(filter(None, (where, name)))}: {reason}{hint}")
        raise ConfigError("; ".join(problems)) from error


def _host(name: str, common: Mapping[str, Any], given: Any, cluster: ClusterSettings) -> Host:
    where = f"hosts.{name}"
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: is empty; it needs an address, and a broker or a registry")
    settings = _checked(HostSettings, {**common, **given}, where)
    services = []
    if settings.registry is not None:
        services.append(_service(name, "registry", settings.registry, cluster.admin))
    if settings.broker is not None:
        services.append(_service(name, "broker", {**cluster.settings, **settings.broker}, cluster.admin))
    if not services:
        raise ConfigError(f"{where}: needs a broker or a registry")
    return Host(name, settings, tuple(services))


def _service(host: str, kind: Kind, given: Mapping[str, Any], admin: str) -> Service:
    where = f"hosts.{host}.{kind}"
    names = _names(kind)
    for name in given:
        if name not in names:
            raise ConfigError(f"{where}.{name}: unknown setting{did_you_mean(name, names)}")
    data = str(given.get("data", "not there"))
    if not re.fullmatch(ABSOLUTE_PATH, data):
        raise ConfigError(f"{where}.data: needs an absolute path of letters, digits and ./+-_; it is {data}")
    try:
        settings = load(None, {}, given, names)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error
    if settings.users_file and not (admin and Path(settings.users_file).is_absolute()):
        raise ConfigError(f"{where}.users_file: needs an absolute path, and the key admin must name a user in it")
    service = Service(host, kind, given, settings, admin)
    service.addresses()
    return service


def _check_machines(hosts: Sequence[Host]) -> None:
    """Raise ``ConfigError`` when hosts or services on one machine share a folder or a port."""
    machines: dict[tuple[str, int], list[Host]] = {}
    for host in hosts:
        machines.setdefault((host.settings.address, host.settings.ssh_port), []).append(host)
    for there in machines.values():
        _check_different([(f"hosts.{host.name}.folder", host.settings.folder, f"host {host.name}") for host in there])
        services = [service for host in there for service in host.services]
        _check_different([(f"{service.where}.data", str(service.settings.data), str(service)) for service in services])
        listening = [(service, *found) for service in services for found in service.addresses()]
        for (first, _, one, port), (second, name, other, taken) in itertools.combinations(listening, 2):
            if port == taken and (one == other or {one, other} & set(ANY_HOST)):
                raise ConfigError(f"{second.where}.{name}: port {port} of that machine is already used by the {first}")


def _check_different(folders: Sequence[tuple[str, str, str]]) -> None:
    """Raise ``ConfigError`` for a path that occurs twice. Each folder is its key, its path, and its owner."""
    seen: dict[str, str] = {}
    for key, said, who in folders:
        path = normal_folder(said)
        if path in seen:
            raise ConfigError(f"{key}: {path} of that machine is already used by {seen[path]}")
        seen[path] = who


def _check_replicas(services: list[Service]) -> None:
    seen: dict[tuple[object, ...], Service] = {}
    for service in services:
        if service.kind == "broker":
            key = (*service.group, service.settings.replica_number)
            if key in seen:
                raise ConfigError(
                    f"hosts.{service.host}.broker.replica_number: {service.settings.replica_number} of "
                    f"{service.settings.broker_name} is on {seen[key].host} already; each replica has a number of its own, "
                    f"and each other broker a broker_name"
                )
            seen[key] = service
