"""The settings of the parts that do not know ``Settings``: the store, its retention, the transaction tables."""

from metaq.config import Settings
from metaq.engine.role import ALONE, Role
from metaq.message import Durability
from metaq.store.log.retention import HOUR_MS, RetentionRules
from metaq.store.settings import StoreSettings
from metaq.tx.openbranches import Room


def store_settings(settings: Settings, role: Role = ALONE) -> StoreSettings:
    """Return the store's settings. On a slave readers always wait until the master says what they may see."""
    durability = settings.durability
    if not role.is_master:
        durability = Durability.DISK_REPLICA if durability.on_disk else Durability.REPLICA
    return StoreSettings(
        segment_bytes=settings.segment_bytes,
        queue_file_bytes=settings.queue_file_bytes,
        index_slots=settings.index_slots,
        index_entries=settings.index_entries,
        hot_bytes=settings.hot_bytes,
        open_files=settings.max_open_files,
        durability=durability,
        replicated=settings.durability.on_replicas,
        broker_name=settings.broker_name,
        broker_number=settings.broker_number,
        retention=retention_rules(settings),
    )


def retention_rules(settings: Settings) -> RetentionRules:
    """Return the rules for when segments are deleted and when puts are refused."""
    return RetentionRules(
        keep_ms=round(settings.keep_hours * HOUR_MS),
        hour=settings.delete_hour,
        clean_ratio=settings.clean_ratio,
        force_ratio=settings.force_ratio,
        refuse_ratio=settings.refuse_ratio,
        ample_free_bytes=settings.ample_free_bytes,
        least_free_bytes=settings.least_free_bytes,
    )


def room(settings: Settings) -> Room:
    """Return the limits of transactions; a record group, which holds a whole transaction branch, must fit into a segment."""
    return Room(
        max_branches=settings.max_branches,
        max_branch_bytes=min(settings.max_branch_bytes, settings.segment_bytes // 2),
        max_open_transaction_bytes=settings.max_open_transaction_bytes,
        max_timeout_s=settings.transaction_timeout_ms / 1000,
    )
