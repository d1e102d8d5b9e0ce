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

import difflib
import itertools
import json
import os.path
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from metaq.address import LOOPBACK, Address, parse_address, parse_listen
from metaq.config import FIELDS, REGISTRY_SETTINGS, Settings, load
from metaq.configfile import read_yaml
from metaq.deploy.unit import ABSOLUTE_PATH
from metaq.errors import ConfigError
from metaq.protocol.remoting.codes import FAST_PORT_BELOW

ELECTED: Final = "elected"

Model = TypeVar("Model", bound=BaseModel)
Kind = Literal["broker", "registry"]
COMMANDS: Final[dict[Kind, str]] = {"broker": "serve", "registry": "registry"}
ANY_HOST: Final = ("0.0.0.0", "::")  # noqa: S104 - not listened on

# Paths and names go unquoted into units, shell commands and files of supervisor.
AbsolutePath = Annotated[str, StringConstraints(pattern=f"^{ABSOLUTE_PATH}$")]


class HostSettings(BaseModel):
    """The settings of one machine, and how it is reached."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = Field(min_length=1)
    ssh_user: str = "root"
    ssh_port: int = Field(22, ge=1, le=65535)
    ssh_key: str = ""
    known_hosts: str = ""
    python: str = Field("python3", pattern=r"^[\w./+-]+$")
    folder: AbsolutePath = "/opt/metaq"
    user: str = Field("", pattern=r"^[\w.-]*$")
    processes: Literal["auto", "systemd", "supervisor"] = "auto"
    broker: dict[str, Any] | None = None
    registry: dict[str, Any] | None = None


OF_ONE_HOST: Final = ("address", "broker", "registry")


class ClusterSettings(BaseModel):
    """The settings of the file, except those that all hosts have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str = "."
    keep_releases: int = Field(3, ge=1)
    start_deadline_s: float = Field(300, gt=0)
    admin: str = ""
    settings: dict[str, Any] = {}
    hosts: dict[Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")], Any] = Field(min_length=1)


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
        needed = any(service.settings.zookeeper for host in self.hosts for service in host.services)
        return "[zookeeper]" if needed else ""

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the file. ``ConfigError`` names host and key."""
        try:
            return cls._of({name: given.value for name, given in read_yaml(file).items()})
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> Self:
        common = {name: raw.pop(name) for name in HostSettings.model_fields if name in raw and name not in OF_ONE_HOST}
        settings = _model(ClusterSettings, raw, "")
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


def _model(model: type[Model], values: Any, where: str) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            name = ".".join(map(str, problem["loc"]))
            near = difflib.get_close_matches(name, model.model_fields, 1) if problem["type"] == "extra_forbidden" else []
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{'.'.join(filter(None, (where, name)))}: {problem['msg']}{hint}")
        raise ConfigError("; ".join(problems)) from error


def _host(name: str, common: Mapping[str, Any], given: Any, cluster: ClusterSettings) -> Host:
    where = f"hosts.{name}"
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: is empty; it needs an address, and a broker or a registry")
    settings = _model(HostSettings, {**common, **given}, where)
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
            near = difflib.get_close_matches(name, names, 1)
            raise ConfigError(f"{where}.{name}: unknown setting{f'; did you mean {near[0]}?' if near else ''}")
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
        path = os.path.normpath(said)
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
