"""The addresses that this process listens on, and those of the settings under which it reaches others."""

import ipaddress
import socket
from typing import Final

from metaq.address import Address, parse_address, parse_listen
from metaq.config import Settings
from metaq.errors import ConfigError

LISTEN_BACKLOG: Final = 4096
KEEP_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Options, in seconds and tries, by which a connection ends two minutes after its client's machine or network has gone."""
IPV4_IN_IPV6: Final = "::ffff:"
"""The prefix that an IPv6 listener gives to the IPv4 addresses of its clients. It is removed: addresses are shown and kept as
IPv4."""


def parse_registries(settings: Settings) -> list[Address]:
    """Return the addresses of the registries that the settings name. Raise ``ConfigError`` for a malformed one."""
    return [parse_address(part, setting="registries") for part in settings.registries.split(";") if part.strip()]


def reached_at(listening: Address, advertised: Address) -> Address:
    """Return the address under which others reach this listener: a wildcard host is replaced with the advertised host."""
    return listening._replace(host=advertised.host) if ipaddress.ip_address(listening.host).is_unspecified else listening


def replication_address(settings: Settings, advertised: Address) -> str | None:
    """Return the HOST:PORT where slaves reach this replica while it is master, or ``None`` when it accepts no slaves."""
    if settings.replication_listen == "none":
        return None
    return str(reached_at(parse_address(settings.replication_listen, setting="replication_listen"), advertised))


def resolve(setting: str, value: str, settings: Settings) -> Address:
    """Return the address to listen on.

    Raise ``ConfigError`` when it is malformed or cannot be resolved, or when other machines could reach it although there are
    no users and ``allow_public`` is not set.
    """
    host, port = parse_listen(setting, value)
    try:
        # as bytes where that can be: for a text the codec of international names is loaded, which takes 0.4 MB
        name = host.encode() if host.isascii() else host
        address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"{setting}: cannot resolve {host!r}: {error.strerror}") from error
    if not ipaddress.ip_address(address).is_loopback and not (settings.users_file or settings.allow_public):
        raise ConfigError(
            f"{setting}: other machines can reach {host} and there are no users; set users_file, or use --allow-public if "
            "everybody may do everything"
        )
    return Address(str(address), port)


class Listener:
    """One bound address."""

    def __init__(self, setting: str, address: Address) -> None:
        """Bind the address. Raise ``ConfigError`` with the name of the setting when it is in use."""
        self._setting = setting
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in KEEP_ALIVE:
            self.socket.setsockopt(*option)  # the connections that it accepts inherit them
        self.address = address
        try:
            self.socket.bind(address)
        except OSError as error:
            self.socket.close()
            raise self._taken(error) from error
        self.socket.setblocking(False)
        self.address = Address(address.host, self.socket.getsockname()[1])

    def listen(self) -> None:
        try:
            self.socket.listen(LISTEN_BACKLOG)
        except OSError as error:  # another process bound the same port at the same moment and listens already
            raise self._taken(error) from error

    def _taken(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._setting}: cannot take {self.address}: {error.strerror}; is another broker running?")
