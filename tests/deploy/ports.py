"""The ports of a deployed broker, chosen long before it listens there."""

from typing import Final, NamedTuple

from tests.support.ports import free_ports

WIDTH: Final = 8
"""Ports of one broker, those among them that it takes beside what its settings name: above listen, two below remoting."""


class Ports(NamedTuple):
    """The ports of one broker, named like its settings."""

    listen: int
    remoting_listen: int
    registry_listen: int
    replication_listen: int
    http_listen: int

    def settings(self, *names: str) -> dict[str, str]:
        """The addresses, of these names only."""
        return {name: f"127.0.0.1:{getattr(self, name)}" for name in names or self._fields}


def broker_ports(count: int) -> list[Ports]:
    """For so many brokers; nobody listens there or beside them now."""
    blocks = [free_ports(WIDTH) for _ in range(count)]
    return [Ports(block[0], *block[4:]) for block in blocks]
