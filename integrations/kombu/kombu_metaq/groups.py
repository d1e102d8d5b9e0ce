"""The group of a queue: created with the limits that tasks need, or compared with them."""

import logging
import shlex
from typing import Final

from kombu_metaq.terms import QueueTerms
from metaq.client import Admin
from metaq.client.admin.views import GroupView
from metaq.errors import Refused
from metaq.protocol.remoting.codes import Response

logger = logging.getLogger(__name__)

MOST_LEASE_MS: Final = 30 * 24 * 3_600_000
"""The longest time for which a task may run without coming again; brokers alone allow 12 hours."""
_warned: set[str] = set()
"""The groups about which this process was warned: each of its connections finds the same."""


def make_group(admin: Admin, group: str, terms: QueueTerms) -> None:
    """Create the group of a queue, or change it to the limits of the queue; a user who may not is warned."""
    try:
        # an ack that was answered is not lost with its master, which would let the task run again
        admin.update_group(
            GroupView(group, retry_max_times=terms.deliveries, max_invisible_ms=MOST_LEASE_MS, lease_acks="safe")
        )
    except Refused as error:
        if error.code != Response.NO_PERMISSION:
            raise
        _warn(group, terms, f"not an administrator, so the group has the broker's limits reason={error}")


def see_group(admin: Admin, group: str, terms: QueueTerms, invisible_s: float) -> None:
    """Create the group of a queue unless it is there; warn when its limits are lower than those of the queue."""
    view = next((view for view in admin.groups() if view.name == group), None)
    if view is None:
        make_group(admin, group, terms)
    elif view.retry_max_times < terms.deliveries or view.max_invisible_ms < invisible_s * 1000:
        limits = f"retry_max_times={view.retry_max_times} max_invisible_ms={view.max_invisible_ms}"
        _warn(group, terms, f"the group allows fewer deliveries than its queue, or shorter leases than this program {limits}")


def _warn(group: str, terms: QueueTerms, problem: str) -> None:
    """Log, once in this process, a problem with a group and the command that solves it."""
    if group not in _warned:
        _warned.add(group)
        attributes = f"--attribute max_invisible_ms={MOST_LEASE_MS} --attribute lease_acks=safe"
        command = f"metaq group update {shlex.quote(group)} --retry-max-times {terms.deliveries} {attributes}"
        logger.warning("%s group=%s; an administrator can run: %s", problem, group, command)
