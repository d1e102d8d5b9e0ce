"""Addresses: how they are written, what they resolve to, and listening at them."""

import ipaddress
import socket
from typing import Final

from metaq.config import Settings
from metaq.errors import ConfigError

Address = tuple[str, int]

LISTEN_BACKLOG: Final = 4096
IPV4_IN_IPV6: Final = "::ffff:"
"""How a listener of IPv6 writes the IPv4 addresses of its clients, which are shown and kept as such."""


def parse_address(setting: str, value: str) -> Address:
    """Host and port to connect to; ``ConfigError`` when ``value`` is something else."""
    host, _, port = value.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{setting}: {value!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def parse_registries(settings: Settings) -> list[Address]:
    """The registries that the settings name."""
    return [parse_address("registries", part) for part in settings.registries.split(";") if part.strip()]


def written(address: Address) -> str:
    """``HOST:PORT``, a host of IPv6 in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reached_at(listening: Address, advertised: Address) -> Address:
    """Where others reach what listens here: a wildcard stands for the host that clients are told."""
    host, port = listening
    return (advertised[0] if ipaddress.ip_address(host).is_unspecified else host, port)


def replication_address(settings: Settings, advertised: Address) -> str | None:
    """Where slaves reach this replica while it is master, HOST:PORT; ``None`` when it takes none."""
    if settings.replication_listen == "none":
        return None
    return written(reached_at(parse_address("replication_listen", settings.replication_listen), advertised))


def resolve(setting: str, value: str, settings: Settings) -> Address:
    """Host and port to listen on; ``ConfigError`` when others could reach them, there are no users, and nobody allowed it."""
    host, separator, port = value.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{setting}: {value!r} is not HOST:PORT")
    host = host.strip("[]") or "127.0.0.1"
    try:
        address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"{setting}: cannot resolve {host!r}: {error.strerror}") from error
    if not ipaddress.ip_address(address).is_loopback and not (settings.users_file or settings.allow_public):
        raise ConfigError(
            f"{setting}: other machines can reach {host} and there are no users; name a users_file, or say --allow-public if "
            "everybody may do everything"
        )
    return str(address), int(port)


class Listener:
    """One address."""

    def __init__(self, setting: str, address: Address) -> None:
        """Bind; ``ConfigError`` names the setting when the address is taken."""
        self._setting = setting
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.address = address
        try:
            self.socket.bind(address)
        except OSError as error:
            self.socket.close()
            raise self._taken(error) from error
        self.socket.setblocking(False)
        self.address = (address[0], self.socket.getsockname()[1])

    def listen(self) -> None:
        try:
            self.socket.listen(LISTEN_BACKLOG)
        except OSError as error:  # another process bound the same port at the same moment and listens already
            raise self._taken(error) from error

    def _taken(self, error: OSError) -> ConfigError:
        host, port = self.address
        return ConfigError(f"{self._setting}: cannot take {host}:{port}: {error.strerror}; is another broker running?")
