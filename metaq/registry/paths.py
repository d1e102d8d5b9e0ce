"""What stands in ZooKeeper: MetaQ's nodes, which its clients read, and our own (specs: MetaQ text protocol, section 6).

Pure: paths and data, built and parsed. Data is UTF-8; E is ephemeral, P persistent. ``root`` is ``/meta`` unless changed::

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

from metaq.errors import BadRequest
from metaq.protocol.remoting.routes import DataVersion

BROKERS: Final = "/metaq/brokers"
"""Our own nodes, whatever the root of MetaQ's is."""
TOPICS: Final = "topics"
"""The tree that only clients in other languages than Java still read."""
TOPICS_TO_PUBLISH: Final = "topics-pub"
TOPICS_TO_SUBSCRIBE: Final = "topics-sub"
_REPLICA: Final = re.compile(r"(\d+)-(?:m|s(\d+))")
_PARTITION: Final = re.compile(r"(\d+)-(\d+)")
_ADDRESS: Final = re.compile(r"meta://(\S+):(\d+)")


class Replica(NamedTuple):
    """One process of a broker: the master (``slave`` is ``None``), or a slave."""

    broker: int
    slave: int | None

    @property
    def name(self) -> str:
        """In the trees of topics."""
        return f"{self.broker}-m" if self.slave is None else f"{self.broker}-s{self.slave}"

    @property
    def node(self) -> str:
        """Under ``ids/<b>``."""
        return "master" if self.slave is None else f"slave{self.slave}"


def parse_replica(name: str) -> Replica:
    """The inverse of ``Replica.name``; ``BadRequest``."""
    found = _REPLICA.fullmatch(name)
    if found is None:
        raise BadRequest(f"{name!r} names no replica: it is neither NUMBER-m nor NUMBER-sNUMBER")
    return Replica(int(found[1]), None if found[2] is None else int(found[2]))


class Layout(NamedTuple):
    """The paths of MetaQ's nodes under one root."""

    root: str = "/meta"

    def broker(self, broker: int) -> str:
        """Of all replicas of a broker."""
        return f"{self.root}/brokers/ids/{broker}"

    def replica(self, replica: Replica) -> str:
        """A live replica."""
        return f"{self.broker(replica.broker)}/{replica.node}"

    def checksum(self, broker: int) -> str:
        """Its change tells slaves that the master's configuration has changed."""
        return f"{self.broker(broker)}/master_config_checksum"

    def topics(self, tree: str) -> str:
        """All topics in one of the three trees."""
        return f"{self.root}/brokers/{tree}"

    def topic(self, tree: str, topic: str, replica: Replica) -> str:
        """A replica that has a topic."""
        return f"{self.topics(tree)}/{topic}/{replica.name}"

    @property
    def groups(self) -> str:
        """All groups of consumers."""
        return f"{self.root}/consumers"

    def consumers(self, group: str) -> str:
        """The live members of a group."""
        return f"{self.root}/consumers/{group}/ids"

    def offsets(self, group: str) -> str:
        """The topics in which a group has consumed something."""
        return f"{self.root}/consumers/{group}/offsets"

    def progress(self, group: str, topic: str) -> str:
        """How far a group has consumed the partitions of a topic; the children are named ``<b>-<p>``."""
        return f"{self.offsets(group)}/{topic}"

    def offset(self, group: str, topic: str, broker: int, partition: int) -> str:
        """How far a group has consumed a partition."""
        return f"{self.progress(group, topic)}/{broker}-{partition}"

    def owned(self, group: str) -> str:
        """The topics of which members of a group have had partitions."""
        return f"{self.root}/consumers/{group}/owners"

    def owners(self, group: str, topic: str) -> str:
        """Who of a group has which partitions of a topic; the children are named ``<b>-<p>``."""
        return f"{self.owned(group)}/{topic}"


def encode_address(host: str, port: int) -> bytes:
    """Of a broker's text protocol; IPv6 stands in brackets."""
    place = f"[{host}]" if ":" in host else host
    return f"meta://{place}:{port}".encode()


def decode_address(data: bytes) -> tuple[str, int]:
    """The inverse of ``encode_address``; ``BadRequest``."""
    found = _ADDRESS.fullmatch(data.decode(errors="replace"))
    if found is None:
        raise BadRequest(f"{data[:80]!r} is not meta://HOST:PORT")
    return found[1].strip("[]"), int(found[2])


def encode_partitions(count: int, replica: Replica) -> bytes:
    """For ``topics-pub`` and ``topics-sub``: a key more would make the Java client skip the broker."""
    return f'{{"numParts":{count},"broker":"{replica.name}"}}'.encode()


def parse_partition(name: str) -> tuple[int, int]:
    """The broker's number and the partition's, of a child of ``owners`` or ``offsets``; ``BadRequest``."""
    found = _PARTITION.fullmatch(name)
    if found is None:
        raise BadRequest(f"{name!r} is not BROKER-PARTITION")
    return int(found[1]), int(found[2])


def decode_offset(data: bytes) -> tuple[int | None, int]:
    """A message id, which old clients leave out and which may be negative, and an offset in bytes; ``BadRequest``."""
    text = data.decode(errors="replace")
    message_id, separator, offset = text.rpartition("-")
    try:
        return (int(message_id) if separator else None), int(offset)
    except ValueError as error:
        raise BadRequest(f"{text[:80]!r} is not MESSAGE_ID-OFFSET") from error


class BrokerNode(NamedTuple):
    """What one of our brokers says of itself to the others, and to our clients. Addresses are HOST:PORT."""

    remoting: str
    """For clients of the remoting protocol."""
    registry: str | None
    """Where it answers as a registry."""
    text: str
    replication: str | None
    """Where slaves connect."""
    number: int
    """0 for a master, otherwise the replica's number."""
    permission: int
    """What the broker as a whole allows: a sum of ``READ`` and ``WRITE``."""
    version: DataVersion
    """Of its table of topics: another one, and there is something to ask it for."""

    def encode(self) -> bytes:
        version = [self.version.timestamp, self.version.counter]
        return json.dumps({**self._asdict(), "version": version}, separators=(",", ":")).encode()


class Member(NamedTuple):
    """A replica of one of our brokers, by name."""

    cluster: str
    broker_name: str
    replica_number: int

    @property
    def path(self) -> str:
        """Of its ``BrokerNode``."""
        return f"{BROKERS}/{self.cluster}/{self.broker_name}/{self.replica_number}"


def parse_member(path: str) -> Member:
    """The inverse of ``Member.path``; ``BadRequest``."""
    parts = path.removeprefix(f"{BROKERS}/").split("/")
    if len(parts) != 3 or not parts[2].isdecimal():
        raise BadRequest(f"{path} is no path of a broker")
    return Member(parts[0], parts[1], int(parts[2]))


def decode_broker_node(data: bytes) -> BrokerNode:
    """The inverse of ``BrokerNode.encode``; keys of later versions are left out. ``BadRequest``."""
    try:
        row = json.loads(data)
        timestamp, counter = row["version"]
        version = DataVersion(int(timestamp), int(counter))
        texts = {key: None if row[key] is None else str(row[key]) for key in ("registry", "replication")}
        numbers = int(row["number"]), int(row["permission"])
        return BrokerNode(str(row["remoting"]), texts["registry"], str(row["text"]), texts["replication"], *numbers, version)
    except (ValueError, TypeError, LookupError) as error:
        raise BadRequest(f"a broker's node in ZooKeeper cannot be read: {data[:80]!r}") from error
