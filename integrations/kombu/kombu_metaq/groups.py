"""The group of a queue: created with the limits that its tasks need, or compared with them."""

import logging
import shlex

from kombu_metaq.terms import MOST_LEASE_MS, QueueTerms
from metaq.client import Admin
from metaq.client.admin.views import GroupView
from metaq.errors import Refused
from metaq.protocol.remoting.codes import Response

logger = logging.getLogger(__name__)

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
    view = _view(admin, group)
    if view is None:
        make_group(admin, group, terms)
    elif view.retry_max_times < terms.deliveries or view.max_invisible_ms < invisible_s * 1000:
        limits = f"retry_max_times={view.retry_max_times} max_invisible_ms={view.max_invisible_ms}"
        _warn(group, terms, f"the group allows fewer deliveries than its queue, or shorter leases than this program {limits}")


def check_lease(admin: Admin, group: str, invisible_s: float) -> None:
    """Raise ``ValueError`` when a group allows no leases of so many seconds: brokers would refuse all requests for messages."""
    most_ms = (_view(admin, group) or GroupView(group)).max_invisible_ms
    if invisible_s * 1000 > most_ms:
        command = f"metaq group update {shlex.quote(group)} --attribute max_invisible_ms={MOST_LEASE_MS}"
        raise ValueError(
            f"visibility_timeout is {invisible_s:.10g} s, and the group {group} allows leases of {most_ms / 1000:.10g} s "
            f"(max_invisible_ms): lower visibility_timeout, or let an administrator run: {command}"
        )


def _view(admin: Admin, group: str) -> GroupView | None:
    return next((view for view in admin.groups() if view.name == group), None)


def _warn(group: str, terms: QueueTerms, problem: str) -> None:
    """Log, once in this process, a problem with a group and the command that solves it."""
    if group not in _warned:
        _warned.add(group)
        attributes = f"--attribute max_invisible_ms={MOST_LEASE_MS} --attribute lease_acks=safe"
        command = f"metaq group update {shlex.quote(group)} --retry-max-times {terms.deliveries} {attributes}"
        logger.warning("%s group=%s; an administrator can run: %s", problem, group, command)
