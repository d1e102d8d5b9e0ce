"""Addresses as host and port, and their written form HOST:PORT."""

from typing import Final, NamedTuple

from metaq.errors import BadRequest, ConfigError

LOOPBACK: Final = "127.0.0.1"
HIGHEST_PORT: Final = 65535
REGISTRY_PORT: Final = 9876
"""Where a registry listens unless it is told otherwise."""


class Address(NamedTuple):
    """A host, by name or by number and without brackets, and a port. As text it is ``HOST:PORT``, with IPv6 in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, setting: str = "", lowest_port: int = 1, default_port: int | None = None) -> Address:
    """Return the address in a text; one without a port has the default one.

    Raise ``ConfigError`` for the value of a setting, otherwise ``BadRequest``, when the text is not ``HOST:PORT``.
    """
    written = text.strip()
    if default_port is not None and (":" not in written or written.endswith("]")):
        written = f"{written}:{default_port}"
    host, _, port = written.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if _is_host(host) and port.isascii() and port.isdecimal() and lowest_port <= int(port) <= HIGHEST_PORT:
        return Address(host, int(port))
    ports = f"with a port from {lowest_port} to {HIGHEST_PORT}"
    if setting:
        raise ConfigError(f"{setting}: {text!r} is not HOST:PORT {ports}")
    raise BadRequest(f"{text!r} is not an address; write host:port {ports}")


def parse_listen(setting: str, text: str) -> Address:
    """Return the address to listen on: no host is the loopback, port 0 any free port. Raise ``ConfigError``."""
    return parse_address(LOOPBACK + text if text.rfind(":") == 0 else text, setting=setting, lowest_port=0)


def _is_host(host: str) -> bool:
    if not set(host) & set(":[]"):
        return bool(host)
    import ipaddress  # noqa: PLC0415 - a millisecond, for brackets and colons only

    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
