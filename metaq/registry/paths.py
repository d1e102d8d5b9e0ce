"""The nodes in ZooKeeper: MetaQ's, which its clients read, and our own (specs: MetaQ text protocol, section 6).

The functions are pure: they build and parse paths and data. Data is UTF-8; E is ephemeral, P persistent. ``root`` is ``/meta``
unless it is configured::

    root/brokers/ids/<b>                            P  meta://host:port of the master, for old clients
    root/brokers/ids/<b>/master                     E  meta://host:port
    root/brokers/ids/<b>/slave<s>                   E  meta://host:port
    root/brokers/ids/<b>/master_config_checksum     E  CRC-32 of the configuration, decimal
    root/brokers/topics/<t>/<replica>               E  number of partitions, decimal
    root/brokers/topics-pub/<t>/<replica>           E  {"numParts":<n>,"broker":"<replica>"}, if the topic takes messages
    root/brokers/topics-sub/<t>/<replica>           E  the same, if it gives some
    root/consumers/<g>/ids/<consumer>               E  the topics that it subscribes, joined by commas
    root/consumers/<g>/offsets/<t>/<b>-<p>          P  <message id>-<offset>
    root/consumers/<g>/owners/<t>/<b>-<p>           E  the consumer that has the partition

    /metaq/brokers/<cluster>/<broker name>/<replica number>     E  a ``BrokerNode``

``<b>`` is a broker's number, which its slaves share; ``<replica>`` is ``<b>-m`` for the master, ``<b>-s<s>`` for a slave.
"""

import json
import re
from typing import Final, NamedTuple

from metaq.address import Address
from metaq.errors import BadRequest
from metaq.protocol.remoting.routes import DataVersion

BROKERS: Final = "/metaq/brokers"
"""The parent of our own nodes, whatever the root of MetaQ's nodes is."""
TOPICS: Final = "topics"
"""The old tree of topics, which only clients in other languages than Java still read."""
TOPICS_TO_PUBLISH: Final = "topics-pub"
TOPICS_TO_SUBSCRIBE: Final = "topics-sub"
_REPLICA: Final = re.compile(r"(\d+)-(?:m|s(\d+))")
_PARTITION: Final = re.compile(r"(\d+)-(\d+)")


class Replica(NamedTuple):
    """One process of a broker: the master (``slave`` is ``None``), or a slave."""

    broker: int
    slave: int | None

    @property
    def name(self) -> str:
        """The replica's name in the trees of topics."""
        return f"{self.broker}-m" if self.slave is None else f"{self.broker}-s{self.slave}"

    @property
    def node(self) -> str:
        """The name of the replica's node under ``ids/<b>``."""
        return "master" if self.slave is None else f"slave{self.slave}"


def parse_replica(name: str) -> Replica:
    """Parse a ``Replica.name``; raise ``BadRequest`` when it is none."""
    found = _REPLICA.fullmatch(name)
    if found is None:
        raise BadRequest(f"{name!r} is not a replica's name: NUMBER-m or NUMBER-sNUMBER")
    return Replica(int(found[1]), None if found[2] is None else int(found[2]))


class Layout(NamedTuple):
    """The paths of MetaQ's nodes under one root."""

    root: str = "/meta"

    def broker(self, broker: int) -> str:
        """Return the parent of all replicas of a broker."""
        return f"{self.root}/brokers/ids/{broker}"

    def replica(self, replica: Replica) -> str:
        """Return the node of a live replica."""
        return f"{self.broker(replica.broker)}/{replica.node}"

    def checksum(self, broker: int) -> str:
        """Return the node whose changes show slaves that the master's configuration has changed."""
        return f"{self.broker(broker)}/master_config_checksum"

    def topics(self, tree: str) -> str:
        """Return the parent of all topics in one of the three trees."""
        return f"{self.root}/brokers/{tree}"

    def topic(self, tree: str, topic: str, replica: Replica) -> str:
        """Return the node of a replica that has a topic, in one of the three trees."""
        return f"{self.topics(tree)}/{topic}/{replica.name}"

    @property
    def groups(self) -> str:
        """The parent of all consumer groups."""
        return f"{self.root}/consumers"

    def consumers(self, group: str) -> str:
        """Return the parent of the live members of a group."""
        return f"{self.root}/consumers/{group}/ids"

    def offsets(self, group: str) -> str:
        """Return the parent of the topics in which a group has stored offsets."""
        return f"{self.root}/consumers/{group}/offsets"

    def progress(self, group: str, topic: str) -> str:
        """Return the parent of a group's offsets in a topic; the children are named ``<b>-<p>``."""
        return f"{self.offsets(group)}/{topic}"

    def offset(self, group: str, topic: str, broker: int, partition: int) -> str:
        """Return the node of a group's offset in a partition."""
        return f"{self.progress(group, topic)}/{broker}-{partition}"

    def owned(self, group: str) -> str:
        """Return the parent of the topics in which members of a group own, or owned, partitions."""
        return f"{self.root}/consumers/{group}/owners"

    def owners(self, group: str, topic: str) -> str:
        """Return the parent of the owners of a topic's partitions in a group; the children are named ``<b>-<p>``."""
        return f"{self.owned(group)}/{topic}"


def encode_address(address: Address) -> bytes:
    """Encode the address of a broker's text protocol."""
    return f"meta://{address}".encode()


def encode_partitions(count: int, replica: Replica) -> bytes:
    """Encode the data of ``topics-pub`` and ``topics-sub``; one more key would make the Java client skip the broker."""
    return f'{{"numParts":{count},"broker":"{replica.name}"}}'.encode()


def parse_partition(name: str) -> tuple[int, int]:
    """Parse the name of a child of ``owners`` or ``progress`` into the numbers of broker and partition.

    Raises ``BadRequest`` when it is no such name.
    """
    found = _PARTITION.fullmatch(name)
    if found is None:
        raise BadRequest(f"{name!r} is not BROKER-PARTITION")
    return int(found[1]), int(found[2])


def decode_offset(data: bytes) -> tuple[int | None, int]:
    """Decode a stored offset into a message id, which old clients leave out and which may be negative, and a byte offset.

    Raises ``BadRequest`` when it is none.
    """
    text = data.decode(errors="replace")
    message_id, separator, offset = text.rpartition("-")
    try:
        return (int(message_id) if separator else None), int(offset)
    except ValueError as error:
        raise BadRequest(f"{text[:80]!r} is not MESSAGE_ID-OFFSET") from error


class BrokerNode(NamedTuple):
    """A broker's description of itself for other brokers and for our clients. Addresses are HOST:PORT."""

    remoting: str
    """The address for clients of the remoting protocol."""
    registry: str | None
    """The address where it answers as a registry, if it does."""
    text: str
    replication: str | None
    """The address to which slaves connect, if it takes slaves."""
    number: int
    """0 for a master, otherwise the replica's number."""
    permission: int
    """The permission of the broker as a whole: a sum of ``READ`` and ``WRITE``."""
    version: DataVersion
    """The version of its topic table: when it changes, there is a new table to ask the broker for."""

    def encode(self) -> bytes:
        version = [self.version.timestamp, self.version.counter]
        return json.dumps({**self._asdict(), "version": version}, separators=(",", ":")).encode()


class RegisteredReplica(NamedTuple):
    """A replica of a broker, by cluster, broker name and replica number."""

    cluster: str
    broker_name: str
    replica_number: int

    @property
    def path(self) -> str:
        """The path of its ``BrokerNode``."""
        return f"{BROKERS}/{self.cluster}/{self.broker_name}/{self.replica_number}"


def parse_member(path: str) -> RegisteredReplica:
    """Parse a ``RegisteredReplica.path``; raise ``BadRequest`` when it is none."""
    parts = path.removeprefix(f"{BROKERS}/").split("/")
    if len(parts) != 3 or not parts[2].isdecimal():
        raise BadRequest(f"{path} is not a broker's path")
    return RegisteredReplica(parts[0], parts[1], int(parts[2]))


def decode_broker_node(data: bytes) -> BrokerNode:
    """Decode a ``BrokerNode``, ignoring keys of later versions; raise ``BadRequest`` when it cannot be read."""
    try:
        row = json.loads(data)
        timestamp, counter = row["version"]
        version = DataVersion(int(timestamp), int(counter))
        texts = {key: None if row[key] is None else str(row[key]) for key in ("registry", "replication")}
        numbers = int(row["number"]), int(row["permission"])
        return BrokerNode(str(row["remoting"]), texts["registry"], str(row["text"]), texts["replication"], *numbers, version)
    except (ValueError, TypeError, LookupError) as error:
        raise BadRequest(f"a broker's node in ZooKeeper cannot be read: {data[:80]!r}") from error
