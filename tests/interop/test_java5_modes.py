"""A group that changes between pops and pulls while its members work: RocketMQ's unmodified Java client 5."""

from __future__ import annotations

from typing import Final

import pytest

from tests.interop.conftest import Start5
from tests.interop.java5 import NEWEST, Java5, Place, let_pop, set_mode, set_up
from tests.interop.mqadmin import AdminTool
from tests.support.broker import BrokerProcess, wait_until

pytestmark = [
    pytest.mark.partner("java", "mvn"),
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.parametrize("version", [NEWEST], indirect=True, scope="module"),
]

WAIT_S: Final = 120.0
QUEUES: Final = 4
INVISIBLE_MS: Final = 5000
LEASE_MS: Final = 30_000
"""Longer than it takes to change the mode, and as long as a delay level."""
BACKLOG: Final = 200
"""Messages before each change: members are still busy with them then."""
SLEEP_MS: Final = 20
MORE_THAN_TAKEN: Final = 1024
"""Messages of which some are left for others: a member takes no more than 96 and one pop before it has consumed some."""


class Members:
    """Two members of a group, and all that they were given."""

    def __init__(self, clients: tuple[Java5, Java5], name: str) -> None:
        self._clients = clients
        self._name = name
        self._sent = 0
        for client in clients:
            client.start_consumer(name, name, name, invisible_ms=INVISIBLE_MS, sleep_ms=SLEEP_MS, threads=4)

    def send(self, count: int) -> None:
        """Send this many at once: sent one by one, they may be consumed as fast as they come."""
        self._clients[0].publish_numbers(self._name, self._name, count, self._sent)
        self._sent += count

    def wait_for_mode(self, mode: str) -> None:
        """Send until each member is given a message in this mode that is sent from now on."""
        first = self._sent

        def is_given() -> bool:
            self.send(1)
            return all(self._modes(client, first) >= {mode} for client in self._clients)

        wait_until(is_given, WAIT_S, f"both members work in mode {mode}", 0.1)

    def _modes(self, client: Java5, first: int) -> set[str]:
        """Return the modes in which a member was given messages from one on: only a pop makes a receipt."""
        messages = [message for message in client.messages(self._name) if int(message.body) >= first]
        return {"POP" if "POP_CK" in message.properties else "PULL" for message in messages}

    def retried(self) -> set[bytes]:
        """Return the bodies that came through the retry topic."""
        given = [message for client in self._clients for message in client.messages(self._name)]
        return {message.body for message in given if "RETRY_TOPIC" in message.properties}

    def missing(self) -> set[int]:
        given = {int(body) for client in self._clients for body in client.bodies(self._name)}
        return set(range(self._sent)) - given


def lease(place: Place, members: Members) -> set[bytes]:
    """Lease messages that nobody acks, sending until the members leave some; return their bodies."""
    taken: set[bytes] = set()

    def is_taken() -> bool:
        members.send(MORE_THAN_TAKEN)
        taken.update(place.pop(invisible_ms=LEASE_MS).bodies)
        return bool(taken)

    wait_until(is_taken, WAIT_S, "a pop between those of the members")
    return taken


def test_nothing_is_lost_when_the_mode_changes(broker: BrokerProcess, start5: Start5, name: str) -> None:
    """A-08: POP, PULL and POP again, each time while members have messages in hand and more come. What is leased to somebody
    who never acks it comes to the members through the retry topic."""
    clients = start5(broker.registry), start5(broker.registry)
    tool = AdminTool(clients[0], broker.registry)
    set_up(broker.registry, name, name, QUEUES)
    let_pop(broker, name, name)
    clients[0].start_producer(name, name)
    members = Members(clients, name)
    members.wait_for_mode("POP")
    members.send(BACKLOG)
    leased = lease(Place(clients[0], broker.address, name, name), members)
    set_mode(tool, name, name, "PULL")
    members.wait_for_mode("PULL")
    wait_until(lambda: leased <= members.retried(), WAIT_S, "all that was leased at members that pull", 0.2)
    members.send(BACKLOG)
    set_mode(tool, name, name, "POP")
    members.wait_for_mode("POP")
    wait_until(lambda: not members.missing(), WAIT_S, "each message at some member", 0.2)
    for client in clients:
        client.kill()
