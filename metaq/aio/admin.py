"""Administration for asyncio."""

import metaq.client as blocking
from metaq.aio.faces import Threads, iterated, makes, threaded
from metaq.client.admin.leases import LeaseAdmin as BlockingLeaseAdmin
from metaq.client.admin.offsetexport import OffsetExport as BlockingOffsetExport
from metaq.client.admin.replicas import ReplicaAdmin as BlockingReplicaAdmin
from metaq.client.admin.timers import TimerAdmin as BlockingTimerAdmin
from metaq.client.admin.transactions import TransactionAdmin as BlockingTransactionAdmin


class TransactionAdmin:
    """See ``metaq.client.admin.transactions``; made by ``Admin.transactions``."""

    def __init__(self, admin: BlockingTransactionAdmin, threads: Threads) -> None:
        self._blocking = admin
        self._threads = threads

    branches = iterated(BlockingTransactionAdmin.branches)
    halves = iterated(BlockingTransactionAdmin.halves)
    branch = threaded(BlockingTransactionAdmin.branch)
    half = threaded(BlockingTransactionAdmin.half)
    decide = threaded(BlockingTransactionAdmin.decide)
    forget = threaded(BlockingTransactionAdmin.forget)
    decide_half = threaded(BlockingTransactionAdmin.decide_half)


class ReplicaAdmin:
    """See ``metaq.client.admin.replicas``; made by ``Admin.replicas``."""

    def __init__(self, admin: BlockingReplicaAdmin, threads: Threads) -> None:
        self._blocking = admin
        self._threads = threads

    status = threaded(BlockingReplicaAdmin.status)
    promote = threaded(BlockingReplicaAdmin.promote)
    demote = threaded(BlockingReplicaAdmin.demote)
    hand_over = threaded(BlockingReplicaAdmin.hand_over)


class TimerAdmin:
    """See ``metaq.client.admin.timers``; made by ``Admin.timers``."""

    def __init__(self, admin: BlockingTimerAdmin, threads: Threads) -> None:
        self._blocking = admin
        self._threads = threads

    pending = iterated(BlockingTimerAdmin.pending)
    cancel = threaded(BlockingTimerAdmin.cancel)
    stats = threaded(BlockingTimerAdmin.stats)
    recurring = iterated(BlockingTimerAdmin.recurring)
    define = threaded(BlockingTimerAdmin.define)
    undefine = threaded(BlockingTimerAdmin.undefine)


class LeaseAdmin:
    """See ``metaq.client.admin.leases``; made by ``Admin.leases``."""

    def __init__(self, admin: BlockingLeaseAdmin, threads: Threads) -> None:
        self._blocking = admin
        self._threads = threads

    partitions = iterated(BlockingLeaseAdmin.partitions)
    messages = iterated(BlockingLeaseAdmin.messages)
    topics = iterated(BlockingLeaseAdmin.topics)


class OffsetExport:
    """See ``metaq.client.admin.offsetexport``; made by ``Admin.offset_export``."""

    def __init__(self, export: BlockingOffsetExport, threads: Threads) -> None:
        self._blocking = export
        self._threads = threads

    pages = iterated(BlockingOffsetExport.pages)
    history = iterated(BlockingOffsetExport.history)


class Admin:
    """See ``metaq.Admin``; made by ``Client.admin``."""

    def __init__(self, admin: blocking.Admin, threads: Threads) -> None:
        self._blocking = admin
        self._threads = threads

    brokers = threaded(blocking.Admin.brokers)
    masters = threaded(blocking.Admin.masters)
    identity = threaded(blocking.Admin.identity)
    broker_info = threaded(blocking.Admin.broker_info)
    broker_config = threaded(blocking.Admin.broker_config)
    update_broker_config = threaded(blocking.Admin.update_broker_config)
    set_broker_writable = threaded(blocking.Admin.set_broker_writable)
    topics = threaded(blocking.Admin.topics)
    route = threaded(blocking.Admin.route)
    topic_config = threaded(blocking.Admin.topic_config)
    all_topic_configs = threaded(blocking.Admin.all_topic_configs)
    system_topics = threaded(blocking.Admin.system_topics)
    create_topic = threaded(blocking.Admin.create_topic)
    delete_topic = threaded(blocking.Admin.delete_topic)
    readable = threaded(blocking.Admin.readable)
    queues = threaded(blocking.Admin.queues)
    groups = threaded(blocking.Admin.groups)
    groups_at = threaded(blocking.Admin.groups_at)
    groups_of_topic = threaded(blocking.Admin.groups_of_topic)
    update_group = threaded(blocking.Admin.update_group)
    delete_group = threaded(blocking.Admin.delete_group)
    topics_of_group = threaded(blocking.Admin.topics_of_group)
    members = threaded(blocking.Admin.members)
    members_at = threaded(blocking.Admin.members_at)
    producers = threaded(blocking.Admin.producers)
    member_state = threaded(blocking.Admin.member_state)
    member_work = threaded(blocking.Admin.member_work)
    group_lag = threaded(blocking.Admin.group_lag)
    lag_at = threaded(blocking.Admin.lag_at)
    offsets = threaded(blocking.Admin.offsets)
    reset_offset = threaded(blocking.Admin.reset_offset)
    query_by_key = threaded(blocking.Admin.query_by_key)
    query_by_id = threaded(blocking.Admin.query_by_id)
    query_by_offset_id = threaded(blocking.Admin.query_by_offset_id)
    query_by_time = iterated(blocking.Admin.query_by_time)
    count_dead_letters = threaded(blocking.Admin.count_dead_letters)
    dead_letters = threaded(blocking.Admin.dead_letters)
    discard_dead_letters = threaded(blocking.Admin.discard_dead_letters)
    replay = threaded(blocking.Admin.replay)
    read = iterated(blocking.Admin.read)
    transactions = makes(blocking.Admin.transactions, TransactionAdmin)
    timers = makes(blocking.Admin.timers, TimerAdmin)
    leases = makes(blocking.Admin.leases, LeaseAdmin)
    replicas = makes(blocking.Admin.replicas, ReplicaAdmin)
    offset_export = makes(blocking.Admin.offset_export, OffsetExport)

    @property
    def registries(self) -> tuple[str, ...]:
        """The addresses of the registries that it asks."""
        return self._blocking.registries
