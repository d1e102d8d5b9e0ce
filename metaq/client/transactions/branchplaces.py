"""The brokers that can have XA branches: those that the program names, or those that a registry names."""

import configparser
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Protocol

from metaq.address import parse_address
from metaq.client.connecting.core import Core
from metaq.client.text.requests import DEFAULT_PORT
from metaq.client.text.textclient import TextClient
from metaq.errors import BadRequest, ClientError, RouteNotFound, RouteProblem
from metaq.message import MessageQueue
from metaq.protocol.remoting.codes import MASTER

_BY_DEFAULT: Final = ("system", "numPartitions")


class BranchBrokers(Protocol):
    """The brokers of one session; addresses are ``host:port``."""

    def choose(self) -> str:
        """Return the address of a random broker for a new branch."""
        ...

    def everyone(self) -> Sequence[str]:
        """Return the addresses of all brokers that may have branches."""
        ...

    def partition(self, topic: str, address: str, client: TextClient) -> int:
        """Return the partition for a topic's next message on the broker at ``address``, to which ``client`` is connected."""
        ...


class _Turns:
    """Round robin over the partitions of each topic."""

    def __init__(self) -> None:
        self._count: defaultdict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(random.randrange(1 << 16)))

    def next(self, topic: str, partitions: Sequence[int]) -> int:
        return partitions[next(self._count[topic]) % len(partitions)]


class Named:
    """Brokers that the program names. They report the number of a topic's partitions themselves (``stats config``)."""

    def __init__(self, addresses: str) -> None:
        """Take addresses as ``host:port;host2:port2``, with 8123 as the default port. ``BadRequest`` when none can be read."""
        self._addresses = [
            str(parse_address(part, default_port=DEFAULT_PORT))
            for part in filter(None, map(str.strip, re.split("[;,]", addresses)))
        ]
        if not self._addresses:
            raise BadRequest(f"{addresses!r} is not the address of a broker; write host:port")
        self._turns = _Turns()
        self._partitions: dict[tuple[str, str], int] = {}

    def choose(self) -> str:
        return random.choice(self._addresses)

    def everyone(self) -> Sequence[str]:
        return self._addresses

    def partition(self, topic: str, address: str, client: TextClient) -> int:
        count = self._partitions.get((address, topic)) or self._ask(topic, address, client)
        return self._turns.next(topic, range(count))

    def _ask(self, topic: str, address: str, client: TextClient) -> int:
        """Ask the broker for a topic's partitions. For a new topic, return the default number without remembering it."""
        config = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            config.read_string(client.stats("config"))
            counts = {name: config.getint(name, "numPartitions") for name in config.sections() if name.startswith("topic=")}
            count = counts.get(f"topic={topic}") or config.getint(*_BY_DEFAULT)
        except (configparser.Error, ValueError) as error:
            raise ClientError(f"the settings of {address} do not show the partitions of {topic}; name one: {error}") from error
        self._partitions.update(((address, name.removeprefix("topic=")), number) for name, number in counts.items())
        return count


class Routed:
    """Brokers that a registry names. Every port of a broker speaks the text protocol, so the registered address will do."""

    def __init__(self, core: Core, topics: Sequence[str]) -> None:
        """Choose brokers that take messages for all of ``topics``; any broker if there are none."""
        self._core = core
        self._topics = topics
        self._turns = _Turns()
        self._seen: dict[str, str] = {}  # addresses by name: a registry forgets a broker that is down, but its branches remain

    def choose(self) -> str:
        if not self._topics:
            return random.choice(sorted(self._masters().values()))
        common = set.intersection(*({queue.broker_name for queue in self._writable(topic)} for topic in self._topics))
        if not common:
            shown = ", ".join(self._topics)
            details = f"A branch lives on one broker, and none takes messages for all of {shown}"
            raise RouteNotFound(shown, RouteProblem.NO_LIVE_MASTER, details)
        return self._core.master(random.choice(sorted(common)))

    def everyone(self) -> Sequence[str]:
        """Return all brokers, including those that were there before and are not now."""
        self._seen.update(self._masters())
        return [self._seen[name] for name in sorted(self._seen)]

    def partition(self, topic: str, address: str, client: TextClient) -> int:
        mine = [queue.partition for queue in self._writable(topic) if self._core.routes.address(queue.broker_name) == address]
        if not mine:
            details = f"The branch is on {address}, which takes no message for it; name all topics in xa_session()"
            raise RouteNotFound(topic, RouteProblem.NO_LIVE_MASTER, details)
        if self._core.routes.provisional(topic):
            return 0  # the message creates the topic, with a number of partitions that only the broker knows
        return self._turns.next(topic, mine)

    def _writable(self, topic: str) -> Sequence[MessageQueue]:
        return self._core.routes.writable(topic, self._core.deadline())

    def _masters(self) -> dict[str, str]:
        brokers = self._core.routes.clusters(self._core.deadline()).brokers
        masters = {name: broker.addresses[MASTER] for name, broker in brokers.items() if MASTER in broker.addresses}
        if not masters:
            raise RouteNotFound("", RouteProblem.NO_LIVE_MASTER, "The registry knows no broker at all")
        return masters
