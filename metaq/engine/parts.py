"""What the settings say to the parts that do not know them: the store, its retention, the tables of transactions."""

from metaq.config import Settings
from metaq.engine.role import ALONE, Role
from metaq.message import Durability
from metaq.store.log.retention import HOUR_MS, RetentionRules
from metaq.store.settings import StoreSettings
from metaq.tx.branches import Room


def store_settings(settings: Settings, role: Role = ALONE) -> StoreSettings:
    """The store's part of the settings. A slave's readers wait for what its master says."""
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
    """What is deleted, and when puts are refused."""
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
    """Limits of transactions; a group of the log, which has one whole, fits into a segment."""
    return Room(
        max_branches=settings.max_branches,
        max_branch_bytes=min(settings.max_branch_bytes, settings.segment_bytes // 2),
        max_open_transaction_bytes=settings.max_open_transaction_bytes,
        max_timeout_s=settings.transaction_timeout_ms / 1000,
    )
