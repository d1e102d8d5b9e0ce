"""XA branches over the text protocol (section 5), in the form of PEP 249's two-phase commit extension.

A *branch* is a broker's part of a transaction with other participants, a database for example. Messages sent in it are
invisible until it is committed, and then all of them are visible. ``connect`` returns a session that sends them; ``resolve``
finishes the branches that sessions left prepared.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from metaq.client.connecting.access import Access, Tls
from metaq.client.transactions.branchplaces import Named
from metaq.client.transactions.xaerrors import OutcomeUnknown, XaFailed
from metaq.client.transactions.xasession import (
    DEFAULT_BRANCH_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    XaSession,
    default_qualifier,
)
from metaq.errors import ClientError
from metaq.tx.xacodes import XaCode
from metaq.tx.xid import Xid

__all__ = ["OutcomeUnknown", "Resolved", "XaCode", "XaFailed", "XaSession", "Xid", "connect", "default_qualifier", "resolve"]

logger = logging.getLogger(__name__)


class Resolved(NamedTuple):
    """The result of ``resolve``."""

    committed: int
    rolled_back: int
    undecided: list[Xid]
    """The branches that were left as they are, because their outcome is not known yet."""
    conflicts: list[Xid]
    """The branches that an operator decided differently from the program, or in part; examine them, then ``forget`` them."""
    unreachable: dict[str, ClientError]
    """The brokers that could not be asked, by address; their branches wait for the next call."""


def connect(
    address: str,
    *,
    qualifier: str = "",
    branch_timeout_s: int = DEFAULT_BRANCH_TIMEOUT_S,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    user: str = "",
    password: str = "",
    tls: Tls = False,
) -> XaSession:
    """Return a session with the brokers at an address.

    ``Client.xa_session`` finds brokers by a registry instead.

    Args:
        address: ``host:port`` or ``host:port;host2:port``; the default port is 8123.
        qualifier: the name of the branches that ``tpc_recover`` lists; by default the names of program and host.
        branch_timeout_s: the most seconds from begin to prepare; the broker may allow less. 0 means no limit.
        timeout_s: the time limit of each connection and each answer.
        user: the user's name, when the brokers have users.
        password: the user's secret.
        tls: as ``metaq.connect`` takes it.

    Raises:
        BadRequest: the address cannot be read, or another argument is invalid.
    """
    access = Access(user, password, tls)
    brokers = Named(address)
    return XaSession(brokers, qualifier=qualifier, branch_timeout_s=branch_timeout_s, timeout_s=timeout_s, access=access)


def resolve(session: XaSession, committed: Callable[[Xid], bool | None]) -> Resolved:
    """Finish the branches that were left prepared: commit those whose transaction was committed, roll back the others.

    Branches that cannot be finished now (no answer, undecided) are left for the next call.

    Args:
        session: a session that is in no branch.
        committed: a function that returns whether the transaction of a branch was committed elsewhere, for example by a row
            that it wrote into the database; ``None`` when that is not known yet. It must not return ``False`` for a transaction
            that may still be committed.

    Returns:
        What became of the branches.

    Raises:
        ClientError: the session is in a branch, or no broker can be asked.
    """
    counts = {"COMMIT": 0, "ROLLBACK": 0}
    undecided: list[Xid] = []
    conflicts: list[Xid] = []
    found = session.tpc_recover()
    unreachable = dict(session.unreachable)
    for xid in found:
        outcome = committed(xid)
        if outcome is None:
            undecided.append(xid)
            continue
        try:
            counts["COMMIT" if outcome else "ROLLBACK"] += _finish(session, xid, committed=outcome)
        except OutcomeUnknown as error:
            logger.warning("branch not resolved xid=%s reason=%s", xid, error)
            undecided.append(xid)
        except XaFailed as error:
            if error.code != XaCode.NOTA:  # NOTA: it was resolved elsewhere meanwhile
                logger.error("branch resolved otherwise xid=%s committed=%s reason=%s", xid, outcome, error)
                conflicts.append(xid)
    return Resolved(counts["COMMIT"], counts["ROLLBACK"], undecided, conflicts, unreachable)


def _finish(session: XaSession, xid: Xid, *, committed: bool) -> bool:
    """Commit a branch or roll it back; return ``False`` when an operator has decided the same, which is forgotten then."""
    try:
        (session.tpc_commit if committed else session.tpc_rollback)(xid)
    except XaFailed as error:
        if error.code != (XaCode.HEURCOM if committed else XaCode.HEURRB):
            raise
        session.forget(xid)
        return False
    return True
