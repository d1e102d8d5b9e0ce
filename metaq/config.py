"""The settings of a process: from a YAML file, overridden by METAQ_* environment variables, overridden by flags.

All are fields of one frozen dataclass. An unknown name is an error that suggests the nearest known one. Names end in their
unit. A field made by ``_live`` can change while the process runs (``metaq.server.reload``). ``docs/configuration.md`` is
generated from them.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from metaq.errors import ConfigError
from metaq.fields import Given, WrongFields, declare, declared, from_values
from metaq.message import LONGEST_WINDOW_MS, Durability
from metaq.suggestions import did_you_mean

ENVIRONMENT_PREFIX: Final = "METAQ_"
ENVIRONMENT_OF_CLIENTS: Final = frozenset(
    ("METAQ_BROKER", "METAQ_REGISTRY", "METAQ_CONTEXT", "METAQ_USER", "METAQ_PASSWORD", "METAQ_TLS_CA")
)
"""Variables that the client commands of the command line read; they are not settings of the broker."""

REGISTRY_SETTINGS: Final = (
    # the process, and who may use it
    "data",
    "registry_listen",
    "http_listen",
    "allow_public",
    "users_file",
    "failed_logins_per_minute",
    "tls_certificate",
    "tls_key",
    "log_format",
    "log_level",
    # connections
    "max_connections",
    "max_connections_bytes",
    "max_unsent_bytes",
    "idle_timeout_ms",
    "handshake_timeout_ms",
    "drain_timeout_ms",
    # routes
    "registry_expiry_ms",
    "registry_scan_ms",
    "order_message_enable",
)
"""The settings that a standalone registry takes."""

_NAME: Final = re.compile(r"[%|a-zA-Z0-9_.-]+")
"""The characters of a topic, as each broker and each cluster has one of its name, and dots, as RocketMQ's brokers are named
after their hosts."""
_LONGEST_NAMES: Final = {"broker_name": 127, "cluster_name": 115}
"""In characters: that of a topic; a cluster's topic of replies has 12 more (``metaq.engine.tables.topics.reply_topic``)."""
KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
MOST_HOURS: Final = 1_000_000
"""The longest retention that can be set: 114 years."""


def _live(default: Any, **rules: Any) -> Any:
    """Declare a setting that can change while the process runs: all code that uses it takes the new value at a reload."""
    return declare(default, live=True, **rules)


@dataclass(frozen=True, kw_only=True)
class TopicSettings:
    """One topic that exists from the start."""

    partitions: int = declare(
        1, ge=1, le=1024, description="number of partitions; more than before adds some, fewer has no effect"
    )
    accept_publish: bool = declare(True, description="whether the topic accepts puts")
    accept_subscribe: bool = declare(True, description="whether the topic answers gets")
    priority: bool = declare(
        False, description="whether each partition is a level of priority, the greater the more urgent; false has no effect"
    )
    dedupe_window_ms: int | None = declare(
        None,
        ge=0,
        le=LONGEST_WINDOW_MS,
        description="how long a message with an id that was stored before is not stored again; 0: never; left out: unchanged",
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a broker. Times are in milliseconds, sizes in bytes, ratios between 0 and 1."""

    data: Path = declare(Path("data"), description="folder for all data; created if missing")
    listen: str = declare("127.0.0.1:8123", description="HOST:PORT to listen on; with port 0 the system chooses one")
    remoting_listen: str = declare(
        "127.0.0.1:10911", description='HOST:PORT for RocketMQ clients; the port two below is used, too; "none" turns both off'
    )
    registry_listen: str = declare(
        "127.0.0.1:9876", description="HOST:PORT of the registry; unused by a broker that has registries"
    )
    http_listen: str = declare(
        "",
        description='HOST:PORT of metrics, health, REST; by default on loopback, the port after that of listen; "none": off',
    )
    registries: str = declare(
        "", description="registries to register with, HOST:PORT;HOST:PORT; without this setting the broker runs its own"
    )
    advertise: str = declare(
        "", description="HOST:PORT at which clients reach this broker; by default remoting_listen, or listen if that is none"
    )
    allow_public: bool = declare(
        False, description="allow an address that other machines can reach although there are no users (users_file)"
    )
    users_file: str = declare(
        "", description="file with users and their permissions; without it anyone who can connect can do everything"
    )
    failed_logins_per_minute: int = declare(
        30,
        ge=1,
        le=100_000,
        description="wrong passwords and signatures that are checked for one address; ten times as many for all together",
    )
    tls_certificate: str = declare("", description="certificate chain (PEM) for TLS on every port; without it TLS is refused")
    tls_key: str = declare("", description="private key (PEM), if it is not in the certificate's file")
    cluster_user: str = declare(
        "",
        description="user in users_file that this broker uses to register and to follow its master; needs a secret and admin",
    )
    cluster_tls_ca: str = declare(
        "", description="certificates (PEM) for checking registries and masters; without it connections to them do not use TLS"
    )
    broker_name: str = declare("metaq", description="name of this broker, stored in the data folder")
    broker_number: int = declare(0, ge=0, le=1023, description="number of this broker, stored in the data folder")
    broker_permission: int = _live(
        6,
        ge=0,
        le=6,
        multiple_of=2,
        description="what clients may do with this broker: 4 read messages, 2 write them, 6 both, 0 neither",
    )
    cluster_name: str = declare("DefaultCluster", description="name of the cluster that this broker belongs to")
    role: Literal["master", "slave", "elected"] = declare(
        "master", description="first role of this replica: master, slave, or elected through ZooKeeper"
    )
    replica_number: int = declare(
        1, ge=1, le=1023, description="number of this replica among those that share a broker_name; a slave's RocketMQ brokerId"
    )
    replication_listen: str = declare(
        "none", description='HOST:PORT at which slaves connect while this replica is master; with "none" there are no slaves'
    )
    master: str = declare(
        "", description="replication_listen of the master, for a slave that does not look it up in its registries or ZooKeeper"
    )
    zookeeper: str = declare(
        "", description="ZooKeeper to register with, HOST:PORT,HOST:PORT; the registry of this broker then answers from it"
    )
    zookeeper_root: str = declare("/meta", description="where MetaQ clients look in ZooKeeper (their zk.zkRoot)")
    zookeeper_session_ms: int = declare(
        10_000, ge=1000, le=60_000, description="silence after which ZooKeeper considers this broker dead"
    )
    log_format: Literal["text", "json"] = _live("text", description="format of log lines: key=value, or one JSON object")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = _live(
        "INFO", description="lowest level of log lines that are written"
    )

    durability: Durability = declare(
        Durability.DISK,
        description="what a put waits for: memory (survives a killed process), disk (a power cut), "
        "replica (the loss of the master) or disk+replica",
    )
    min_in_sync: int = declare(
        2,
        ge=1,
        le=16,
        description="at replica: how many replicas, including the master, must have a message before it counts as safe",
    )
    replica_timeout_ms: int = _live(
        3000,
        ge=1,
        description="at replica: how long a put waits for the replicas before the answer says that it is not yet safe",
    )
    replica_lag_ms: int = declare(3000, ge=100, description="how long a slave may lag before it is no longer in sync")
    flush_messages: int = _live(1000, ge=1, description="at memory: messages after which the log is synced")
    flush_interval_ms: int = _live(10_000, ge=1, description="at memory: longest time between two syncs")
    sync_timeout_ms: int = _live(5000, ge=1, description="at disk: how long a put waits for the sync before it is answered 500")
    sweep_interval_ms: int = declare(250, ge=10, description="time between two writes of queue units and of the live mark")
    checkpoint_interval_ms: int = declare(5000, ge=10, description="longest time between two durable checkpoints")

    segment_bytes: int = declare(GIB, ge=4 * KIB, le=64 * GIB, description="size of a commit-log segment")
    queue_file_bytes: int = declare(20 * MIB, ge=256, description="size of a consume-queue file; a multiple of 16")
    index_slots: int = declare(5_000_000, ge=1, le=500_000_000, description="slots of a key-index file, 4 bytes each")
    # the properties of one message have room for about ten thousand keys, and all of them go into one file
    index_entries: int = declare(
        20_000_000, ge=20_000, le=2_000_000_000, description="items of a key-index file, 20 bytes each"
    )
    hot_bytes: int = declare(
        256 * MIB, ge=0, description="size of the newest part of the log, which is read through a memory map"
    )
    max_open_files: int = declare(512, ge=8, description="store files that are open at once")

    keep_hours: float = _live(72.0, gt=0, le=MOST_HOURS, description="age at which a segment expires")
    delete_hour: int = _live(4, ge=0, le=23, description="hour of the day (UTC) in which expired segments are deleted")
    clean_ratio: float = _live(0.75, gt=0, le=1, description="disk use above which expired segments are deleted at any hour")
    force_ratio: float = _live(
        0.85, gt=0, le=1, description="disk use above which the oldest segments are deleted, expired or not"
    )
    refuse_ratio: float = _live(0.90, gt=0, le=1, description="disk use above which puts are refused")
    ample_free_bytes: int = _live(10 * GIB, ge=0, description="with this much free space the three ratios are ignored")
    least_free_bytes: int = _live(64 * MIB, ge=0, description="with less free space than this, puts are refused")
    retention_interval_ms: int = declare(60_000, ge=10, description="time between two checks of age and free space")

    max_line_bytes: int = _live(4 * KIB, ge=64, description="longest command line")
    max_body_bytes: int = _live(MIB, ge=1, description="largest body of a put")
    max_message_bytes: int = _live(
        4 * MIB, ge=1, description="largest body of a message from a RocketMQ client; a segment must have room for it"
    )
    max_transfer_bytes: int = _live(MIB, ge=64, description="largest answer to a get; one message is always returned")
    max_connections: int = _live(10_000, ge=1, description="open connections")
    max_connections_bytes: int = _live(
        512 * MIB, ge=MIB, description="memory of all connections: incomplete commands, puts in progress, unread answers"
    )
    max_unsent_bytes: int = _live(
        8 * MIB,
        ge=KIB,
        description="per connection: unread answers and puts in progress; above it the broker stops reading commands",
    )
    max_waiting_bytes: int = _live(
        256 * MIB, ge=KIB, description="size of all puts that wait for the disk; above it puts are answered 503"
    )
    max_held_gets: int = _live(10_000, ge=0, description="gets that wait for a message")
    max_hold_ms: int = _live(30_000, ge=0, description="longest wait= of a get; longer ones are shortened")
    max_cold_reads: int = _live(1000, ge=1, description="gets that wait for the disk; above it gets are answered 503")
    handshake_timeout_ms: int = _live(
        30_000, ge=100, description="how long a new connection may stay silent before it is closed"
    )
    idle_timeout_ms: int = _live(300_000, ge=100, description="silence after which a connection is closed")
    drain_timeout_ms: int = _live(10_000, ge=0, description="how long an orderly stop waits for answers in progress")

    registration_interval_ms: int = declare(30_000, ge=100, le=60_000, description="time between two registrations")
    registry_expiry_ms: int = declare(120_000, ge=100, description="silence after which the registry removes a broker")
    registry_scan_ms: int = declare(10_000, ge=10, description="time between two checks of the registry for silent brokers")
    order_message_enable: bool = declare(
        False, description="whether the registry's routes include the configuration of ordered topics"
    )

    auto_create_topics: bool = _live(True, description="create a topic with the first put to it")
    default_partitions: int = _live(
        1, ge=1, le=1024, description="partitions of a topic that the first put of the text protocol creates"
    )
    max_topics: int = _live(16_000, ge=1, description="number of topics on this broker")
    store_replies: bool = _live(True, description="keep replies to requests in the log after they were passed on")
    auto_create_groups: bool = _live(True, description="create a consumer group with its first use")
    max_groups: int = _live(16_000, ge=1, description="number of consumer groups on this broker")
    client_expiry_ms: int = _live(120_000, ge=100, description="time without a heartbeat after which a client is removed")
    client_scan_ms: int = declare(10_000, ge=10, description="time between two checks for such clients")
    offset_snapshot_interval_ms: int = declare(
        5000, ge=100, description="time between two snapshots of the consumer offsets; later changes are in the log"
    )
    offset_export_interval_ms: int = declare(
        60_000, ge=0, description="time between two recordings of the offsets of all groups, for reports; 0 records none"
    )
    sql_filter: bool = _live(True, description="whether consumers may filter by SQL92 expressions")
    transaction_timeout_ms: int = _live(
        60_000,
        ge=1,
        description="longest timeout of a transaction, from its begin to its prepare or commit",
    )
    max_branches: int = _live(100_000, ge=1, description="number of transactions that are open or undecided")
    max_branch_bytes: int = _live(16 * 1024**2, ge=1024, description="size of the messages of one transaction")
    max_open_transaction_bytes: int = _live(
        256 * 1024**2, ge=1024, description="size of the messages of all open transactions, which are in memory"
    )
    check_after_ms: int = _live(
        6000,
        ge=0,
        description="age of an undecided transactional message at which its producers are first asked for the outcome",
    )
    check_interval_ms: int = declare(30_000, ge=10, description="time between two such questions about the same message")
    max_checks: int = _live(15, ge=1, description="how often producers are asked before a transactional message is given up")
    max_delay_ms: int = _live(
        400 * 86_400_000, ge=0, description="longest delay of a message that is delivered at a time of its own; 0: no limit"
    )
    timer_engine: Literal["rocksdict", "sqlite3"] = declare(
        "rocksdict", description="what keeps the index of delayed messages: rocksdict (metaq-broker[timers]) or sqlite3"
    )
    topics: dict[str, TopicSettings] = _live({}, description="topics that exist from the start (configuration file only)")

    def __post_init__(self) -> None:
        """Raise ``ValueError`` when the settings do not fit together."""
        for setting, longest in _LONGEST_NAMES.items():
            name = getattr(self, setting)
            if len(name) > longest or not _NAME.fullmatch(name):
                rule = f"1 to {longest} letters, digits and characters of % | _ - . are allowed"
                raise ValueError(f"{setting} is {name[:40]!r} ({len(name)} characters); {rule}")
        if self.queue_file_bytes % 16:
            raise ValueError("queue_file_bytes must be a multiple of 16, the size of a unit")
        # a record is its body, at most 32 KiB of properties and less than 512 other bytes; it never spans segments
        if self.segment_bytes < self.max_body_bytes + 33 * KIB:
            raise ValueError("segment_bytes must be at least max_body_bytes + 33 KiB, so that the largest message fits")
        if not self.clean_ratio <= self.force_ratio <= self.refuse_ratio:
            raise ValueError("clean_ratio must not be above force_ratio, and force_ratio not above refuse_ratio")
        if self.durability.on_replicas and self.replication_listen == "none":
            raise ValueError(f"durability {self.durability} needs replication_listen, the address at which slaves connect")
        if self.cluster_user and not self.users_file:
            raise ValueError("cluster_user needs users_file, which has its secret")
        if self.role == "elected" and not self.zookeeper:
            raise ValueError("role elected needs zookeeper, through which the master is elected")
        if self.role != "master" and self.replication_listen == "none":
            raise ValueError(
                f"role {self.role} needs replication_listen, the address at which slaves connect when this replica is master"
            )

    def merged(self, changes: Mapping[str, Any]) -> Self:
        """Return these settings with ``changes`` applied; ``ConfigError`` when they do not fit together."""
        try:
            return from_values(type(self), {**vars(self), **changes})
        except WrongFields as error:
            raise ConfigError(str(error)) from error


FIELDS: Final = declared(Settings)
"""All settings by name."""
LIVE: Final = frozenset(name for name, field in FIELDS.items() if field.rules.live)
"""The settings that a running process can adopt; the others need a restart."""


def gather_settings(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any], names: Collection[str] = FIELDS
) -> dict[str, Given]:
    """Return the value of each setting that is set, from the source with the highest precedence.

    ``flags`` holds only the flags that were given. The file may set only ``names``; variables for other settings are ignored,
    because they are meant for other processes. ``ConfigError`` when the file cannot be read, or when a name is unknown: it
    names the line or the variable.
    """
    given: dict[str, Given] = {}
    if file is not None:
        from metaq.configfile import read_yaml  # noqa: PLC0415 - brings YAML, which a broker with flags alone does not need

        given = _checked(read_yaml(file), names)
    variables = {
        name[len(ENVIRONMENT_PREFIX) :].lower(): Given(value, name)
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in ENVIRONMENT_OF_CLIENTS
    }
    given |= {name: said for name, said in _checked(variables, FIELDS).items() if name in names}
    given |= {name: Given(value, "--" + name.replace("_", "-")) for name, value in flags.items()}
    return given


def check(given: Mapping[str, Given]) -> Settings:
    """Return the settings in force; ``ConfigError`` names each setting that is wrong, the problem, and where it was set."""
    try:
        return from_values(Settings, {name: said.value for name, said in given.items()})
    except WrongFields as error:
        problems = []
        for place, reason in error.problems:
            said = given.get(place[0]) if place else None
            origin = f" ({said.origin})" if said is not None else ""
            problems.append(f"{'.'.join(place) or 'settings'}: {reason}{origin}")
        raise ConfigError("; ".join(problems)) from error


def load(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any], names: Collection[str] = FIELDS
) -> Settings:
    """Return the settings in force, as ``gather_settings`` finds them; ``ConfigError`` says what is wrong and where."""
    return check(gather_settings(file, environment, flags, names))


def _checked(given: dict[str, Given], names: Collection[str]) -> dict[str, Given]:
    problems = []
    for name, (_, origin) in given.items():
        if name not in names:
            problems.append(f"unknown setting {name!r} in {origin}{did_you_mean(name, names)}")
    if problems:
        raise ConfigError("; ".join(problems))
    return given
