"""The metrics of brokers and registries: name, kind, unit, labels and description of each.

docs/metrics.md has the same as a table.
"""

from typing import Final

from metaq.engine.figures.metrics import Metric, MetricKind


def _counter(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, unit, text, labels)


def _gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, unit, text, labels)


def _histogram(name: str, text: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, "seconds", text)


# -- messages ---------------------------------------------------------------------------------------------------------

MESSAGES_IN: Final = _counter(
    "metaq_messages_in_total", "messages", "Messages that were put and can be read; on a slave, messages copied.", "topic"
)
BYTES_IN: Final = _counter("metaq_in_bytes_total", "bytes", "Bytes of the bodies of those messages.", "topic")
MESSAGES_OUT: Final = _counter(
    "metaq_messages_out_total", "messages", "Messages delivered to consumers and readers.", "topic", "group"
)
BYTES_OUT: Final = _counter("metaq_out_bytes_total", "bytes", "Bytes of the messages delivered.", "topic", "group")
ASKED: Final = _counter("metaq_pulls_total", "pulls", "Gets and pulls that were answered.")
MISSED: Final = _counter("metaq_pulls_empty_total", "pulls", "Gets and pulls that returned no message.")
REFUSED: Final = _counter("metaq_puts_refused_total", "puts", "Puts and sends that were refused, by error.", "reason")
LATE: Final = _counter(
    "metaq_puts_late_total",
    "answers",
    "Answers to the puts of a client in one turn that were stored, but not as safe as configured in time, by what was missing.",
    "lacks",
)
SEND: Final = _histogram(
    "metaq_send_seconds",
    "Seconds from the first put of a turn of the event loop to its answers, when the puts are as safe as configured.",
)
SYNC: Final = _histogram("metaq_fsync_seconds", "Seconds that a sync of the log took.")
TURN: Final = _histogram("metaq_turn_seconds", "Processor seconds of each turn of the event loop.")
LONGEST_TURN: Final = _gauge("metaq_longest_turn_seconds", "seconds", "Processor seconds of the longest turn since the start.")
WAITING_BYTES: Final = _gauge("metaq_waiting_bytes", "bytes", "Bytes of puts that wait for the disk or the replicas.")
SENT_BACK: Final = _counter(
    "metaq_messages_sent_back_total", "messages", "Messages that consumers sent back to be tried again."
)
DEAD: Final = _counter("metaq_dead_letters_total", "messages", "Messages that became dead letters after all retries.")

# -- consumers --------------------------------------------------------------------------------------------------------

LAG: Final = _gauge(
    "metaq_consumer_lag_messages",
    "messages",
    "Messages that a group has not consumed yet, by its offsets or its leases.",
    "group",
    "topic",
)
LAG_AGE: Final = _gauge(
    "metaq_consumer_lag_seconds",
    "seconds",
    "Seconds since the oldest of these messages was stored, without those that are leased, delayed or lined; 0 if none is.",
    "group",
    "topic",
)
READER_LAG: Final = _gauge(
    "metaq_reader_lag_bytes", "bytes", "Bytes that readers of the text protocol have not asked for yet.", "group", "topic"
)
MEMBERS: Final = _gauge("metaq_consumer_members", "connections", "Consumers of a group that are connected now.", "group")
LEASE_READY: Final = _gauge("metaq_lease_ready_messages", "messages", "Messages that can be leased now.", "group", "topic")
LEASE_IN_FLIGHT: Final = _gauge(
    "metaq_lease_in_flight_messages", "messages", "Messages that consumers of a group lease now.", "group", "topic"
)
LEASE_DELAYED: Final = _gauge(
    "metaq_lease_delayed_messages", "messages", "Messages that were given back with a delay that goes on.", "group", "topic"
)
LEASE_LINED: Final = _gauge(
    "metaq_lease_lined_messages",
    "messages",
    "Messages that were never given because others with their keys are before them.",
    "group",
    "topic",
)
LEASE_AGE: Final = _gauge(
    "metaq_lease_oldest_seconds",
    "seconds",
    "Seconds since the lowest message that is not finished was first given; 0 if there is none.",
    "group",
    "topic",
)
LEASE_GIVEN: Final = _counter(
    "metaq_lease_given_total", "messages", "Messages that were leased for the first time.", "group", "topic"
)
LEASE_AGAIN: Final = _counter("metaq_lease_given_again_total", "messages", "Messages that were leased again.", "group", "topic")
LEASE_DEAD: Final = _counter(
    "metaq_lease_given_up_total", "messages", "Leased messages that were given up, most as dead letters.", "group", "topic"
)
LEASE_ACKED: Final = _counter("metaq_lease_acked_total", "messages", "Leased messages that consumers have finished.")
LEASE_MEANINGLESS: Final = _counter(
    "metaq_lease_receipts_stale_total", "receipts", "Receipts and IDs of leases that meant nothing any more."
)
LEASE_OPEN: Final = _gauge("metaq_lease_open_messages", "messages", "Messages that were leased or lined and are not finished.")
LEASE_HELD: Final = _gauge("metaq_held_pops", "pops", "Pops that wait for a message.")
SUBSCRIPTIONS: Final = _gauge("metaq_subscriptions", "subscriptions", "Subscriptions to which messages are pushed.")
LEASE_LOG: Final = _gauge("metaq_lease_log_bytes", "bytes", "Bytes of the records of leases that a start reads.")
LEASE_SNAPSHOTS: Final = _counter("metaq_lease_snapshots_total", "snapshots", "Snapshots of all leases.")
LEASE_UNKEPT: Final = _gauge(
    "metaq_lease_unkept_partitions", "partitions", "Partitions of groups whose leases are in memory only."
)
HELD: Final = _gauge("metaq_held_pulls", "pulls", "Gets and pulls that wait for a message.")
COLD: Final = _counter(
    "metaq_cold_reads_total", "reads", "Reads that had to wait for the disk because their data was not in memory."
)
COLD_NOW: Final = _gauge("metaq_cold_reads_waiting", "reads", "Reads that wait for the disk now.")
CONNECTIONS: Final = _gauge("metaq_connections", "connections", "Open connections by protocol.", "protocol")
CONNECTIONS_BYTES: Final = _gauge(
    "metaq_connections_bytes", "bytes", "Memory of connections in bytes: incomplete commands, puts in progress, answers."
)
EVICTED: Final = _counter("metaq_connections_evicted_total", "connections", "Connections that were closed to free memory.")

# -- store ------------------------------------------------------------------------------------------------------------

LOG_BYTES: Final = _gauge("metaq_log_bytes", "bytes", "Bytes of the log from its oldest message to its end.")
WRITTEN: Final = _counter("metaq_log_written_bytes_total", "bytes", "Bytes written to the log.")
UNSYNCED: Final = _gauge("metaq_log_unsynced_bytes", "bytes", "Bytes at the end of the log that are not yet synced.")
OLDEST: Final = _gauge(
    "metaq_oldest_message_seconds", "seconds", "Seconds since the oldest message was stored; 0 if there is none."
)
DISK_FREE: Final = _gauge("metaq_disk_free_bytes", "bytes", "Free bytes on the file system of the data folder.")
DISK_USED: Final = _gauge("metaq_disk_used_ratio", "ratio", "Used part of that file system, as in df.")
WRITABLE: Final = _gauge(
    "metaq_writable", "0 or 1", "Whether messages are accepted: 0 on a slave, on a full disk and after a failed sync."
)
KEYS_BEHIND: Final = _gauge("metaq_key_index_behind_bytes", "bytes", "Bytes of the log whose keys are not yet indexed.")
KEYS_PAUSED: Final = _gauge("metaq_key_index_paused", "0 or 1", "Whether indexing of keys pauses because there is no room.")
DAMAGED: Final = _counter("metaq_damaged_reads_total", "reads", "Reads that found a damaged or missing record.")
PARTITIONS: Final = _gauge("metaq_partitions", "partitions", "Partitions that ever had a message.")
TOPICS: Final = _gauge("metaq_topics", "topics", "Topics of this broker, including its own.")
GROUPS: Final = _gauge("metaq_groups", "groups", "Consumer groups that this broker knows.")

# -- delays and transactions ------------------------------------------------------------------------------------------

DELAYED: Final = _gauge("metaq_delayed_messages", "messages", "Delayed messages that are not delivered yet.", "level")
TIMERS: Final = _gauge("metaq_timers_pending", "messages", "Messages that are delayed to a time, and not delivered yet.")
TIMERS_LATE: Final = _gauge(
    "metaq_timers_late_seconds",
    "seconds",
    "Seconds since the first of these that waits has been due; 0 if none is late.",
)
TIMERS_DELIVERED: Final = _counter("metaq_timers_delivered_total", "messages", "Messages that were delivered at their time.")
TIMERS_CANCELLED: Final = _counter("metaq_timers_cancelled_total", "messages", "Delayed messages that were cancelled.")
TIMERS_DROPPED: Final = _counter(
    "metaq_timers_dropped_total", "messages", "Delayed messages that could not be delivered at their time."
)
RECURRING: Final = _gauge("metaq_recurring", "messages", "Recurring messages that are defined.")
RECURRING_DROPPED: Final = _counter(
    "metaq_recurring_dropped_total",
    "messages",
    "Those of the messages dropped at their time that were runs of recurring messages.",
)
DUPLICATES: Final = _counter(
    "metaq_duplicates_total", "messages", "Messages that were not stored, as their ids were stored before."
)
DEDUPE_WAITING: Final = _gauge("metaq_dedupe_waiting", "messages", "Stored messages whose ids are not yet in the index of ids.")
DEDUPE_BEHIND: Final = _gauge(
    "metaq_dedupe_behind_bytes", "bytes", "Bytes of the log that a start after a kill would read again for the index of ids."
)
DEDUPE_BYTES: Final = _gauge("metaq_dedupe_index_bytes", "bytes", "Size of the files of the index of ids.")
HALVES: Final = _gauge("metaq_half_messages", "messages", "Transactional messages whose producers have not decided yet.")
HALF_AGE: Final = _gauge(
    "metaq_half_oldest_seconds", "seconds", "Seconds since the oldest of these was put; 0 if there is none."
)
HALF_COMMITTED: Final = _counter("metaq_half_committed_total", "messages", "Transactional messages that were committed.")
HALF_ROLLED_BACK: Final = _counter("metaq_half_rolled_back_total", "messages", "Transactional messages that were rolled back.")
HALF_GIVEN_UP: Final = _counter(
    "metaq_half_given_up_total", "messages", "Transactional messages that were not decided in time."
)
HALF_CHECKS: Final = _counter("metaq_half_checks_total", "questions", "Checks sent to producers about undecided messages.")
BRANCHES: Final = _gauge("metaq_branches_open", "branches", "Transactions that have begun and are not prepared.")
BRANCH_BYTES: Final = _gauge("metaq_branches_open_bytes", "bytes", "Bytes of their messages, which wait in memory.")
PREPARED: Final = _gauge("metaq_branches_prepared", "branches", "XA branches that are prepared and undecided.")
PREPARED_AGE: Final = _gauge(
    "metaq_branch_oldest_prepared_seconds", "seconds", "Seconds since the oldest of these was prepared; 0 if there is none."
)
HEURISTIC: Final = _gauge("metaq_branches_heuristic", "branches", "XA branches decided by an operator and not yet forgotten.")

# -- replicas ---------------------------------------------------------------------------------------------------------

MASTER: Final = _gauge("metaq_is_master", "0 or 1", "Whether this replica is the master.")
EPOCH: Final = _gauge("metaq_epoch", "epochs", "The epoch of this replica's log: every new master begins the next one.")
IN_SYNC: Final = _gauge("metaq_in_sync_replicas", "replicas", "Replicas in sync, including the master.")
LEAST_IN_SYNC: Final = _gauge("metaq_min_in_sync_replicas", "replicas", "Replicas that must be in sync for a put to be safe.")
REPLICA_LAG: Final = _gauge(
    "metaq_replica_lag_bytes",
    "bytes",
    "Bytes of the master's log that a slave lacks; a master reports all slaves, a slave itself.",
    "replica",
)
REPLICA_LAG_AGE: Final = _gauge(
    "metaq_replica_lag_seconds",
    "seconds",
    "Seconds since a slave last had the whole log, reported by the master once it had.",
    "replica",
)
REPLICA_IN_SYNC: Final = _gauge(
    "metaq_replica_in_sync", "0 or 1", "Whether a slave is in sync, reported by the master.", "replica"
)

# -- registries -------------------------------------------------------------------------------------------------------

REGISTERED: Final = _gauge(
    "metaq_registered", "0 or 1", "Whether clients find this broker: in a registry, and in ZooKeeper if that is set."
)
REGISTRY_TOPICS: Final = _gauge("metaq_registry_topics", "topics", "Topics in the tables of the registry of this process.")
REGISTRY_BROKERS: Final = _gauge("metaq_registry_brokers", "processes", "Masters and slaves in the tables of that registry.")

OF_TRANSACTIONS: Final = {
    "half_undecided": HALVES,
    "half_oldest_s": HALF_AGE,
    "half_committed": HALF_COMMITTED,
    "half_rolled_back": HALF_ROLLED_BACK,
    "half_given_up": HALF_GIVEN_UP,
    "half_checks": HALF_CHECKS,
    "tx_open": BRANCHES,
    "tx_open_bytes": BRANCH_BYTES,
    "tx_prepared": PREPARED,
    "tx_oldest_prepared_s": PREPARED_AGE,
    "tx_heuristic": HEURISTIC,
}
"""By the names that ``stats`` uses for them."""
OF_REGISTRIES: Final = (REGISTRY_TOPICS, REGISTRY_BROKERS)
OF_BROKERS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them."""
