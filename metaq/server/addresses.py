"""The addresses that a broker listens on, and the one that it advertises to clients."""

import ipaddress
from typing import Final, NamedTuple

from metaq.address import Address, parse_address
from metaq.config import Settings
from metaq.errors import ConfigError
from metaq.protocol.remoting.codes import FAST_PORT_BELOW
from metaq.server.endpoint import Endpoint

NONE: Final = "none"


class Addresses(NamedTuple):
    """The addresses of a broker, with the actual port numbers."""

    text: Address
    remoting: Address | None
    registry: Address | None
    """The embedded registry's address."""
    advertised: Address
    """The address that clients receive."""


def advertised(settings: Settings, listening: Address) -> Address:
    """Return the address that clients receive. Raise ``ConfigError`` when it is not one that they could connect to."""
    if not settings.advertise:
        if ipaddress.ip_address(listening.host).is_unspecified:
            raise ConfigError(
                f"advertise: {listening.host} is not an address to connect to; set advertise to HOST:PORT of this broker"
            )
        return listening
    return parse_address(settings.advertise, setting="advertise")


def bind(endpoint: Endpoint, settings: Settings) -> Addresses:
    """Bind all addresses that the settings name.

    Raise ``ConfigError`` with the name of the setting when an address is in use.
    """
    text = endpoint.bind("listen", settings.listen)
    remoting = registry = None
    if settings.remoting_listen != NONE:
        host, port = remoting = endpoint.bind("remoting_listen", settings.remoting_listen)
        if not settings.remoting_listen.endswith(":0"):
            endpoint.bind("remoting_listen, the port two below", str(Address(host, port - FAST_PORT_BELOW)))
    if not settings.registries:
        registry = endpoint.bind("registry_listen", settings.registry_listen)
    return Addresses(text, remoting, registry, advertised(settings, remoting or text))
