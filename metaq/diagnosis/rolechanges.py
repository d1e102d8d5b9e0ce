"""Warnings before the role of a replica is changed: what may be lost, and which replica is better.

The command line and the console show them, so they name neither commands nor buttons.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

TWO_MASTERS: Final = """\
There would be two masters: messages that clients still send to the old one are acknowledged, and later removed from its log.
Demote it first."""
ELECTS: Final = """\
The master is elected: no other replica can be made master while it is there. Hand over instead."""
MAY_LIVE: Final = """\
If it still runs, and only some clients reach it, there will be two masters: make sure that it has stopped."""
NOT_IN_SYNC: Final = """\
It was not in sync when it last heard from its master, or has heard from none since it was started: it may lack messages that
were acknowledged. They are lost if it becomes master."""
SUSPECT: Final = """\
It may lack messages that were acknowledged. It becomes master only if you accept that they are lost: """
NO_OTHER: Final = "No other replica is known as master: until one is, this broker name accepts no messages."
CUT: Final = "Records that its new master does not have are removed from its log."


class ReplicaStanding(NamedTuple):
    """A replica, as far as it is known."""

    name: str
    """As a warning names it."""
    error: str | None
    """Why it does not answer; the rest is then not known."""
    is_master: bool = False
    in_sync: bool = False
    """True when it is in sync, or was when it last heard from its master."""
    suspect: str | None = None
    """Why its log may lack acknowledged messages."""
    epoch: int = 0
    end: int = 0
    master_end: int = 0
    """Where its master's log ended when it last heard from it."""

    @property
    def _has_all(self) -> tuple[bool, bool]:
        return self.error is None and self.suspect is None, self.in_sync


def promotion_warnings(replica: ReplicaStanding, others: Iterable[ReplicaStanding], *, elects: bool) -> list[str]:
    """Return warnings of messages that may be lost by making a slave the master; ``elects``: where masters are elected."""
    warnings = []
    for other in others:
        if other.is_master:
            warnings.append(f"{other.name} runs and is master. {ELECTS if elects else TWO_MASTERS}")
        elif other.error is not None:
            warnings.append(f"{other.name} does not answer: {other.error}. {MAY_LIVE}")
        elif (other.epoch, other.end) > (replica.epoch, replica.end):
            warnings.append(f"{other.name} has more: {other.end - replica.end} bytes of epoch {other.epoch}.")
        if other._has_all > replica._has_all:
            warnings.append(f"{other.name} is a better choice: it was in sync, and is not suspect.")
    if replica.suspect is not None:
        warnings.append(f"{SUSPECT}{replica.suspect}")
    if not replica.in_sync:
        warnings.append(NOT_IN_SYNC)
    if replica.end < replica.master_end:
        warnings.append(f"It lacks {replica.master_end - replica.end} bytes of what its master last reported.")
    return warnings


def demotion_warnings(*, has_other: bool) -> list[str]:
    """Return warnings about making a master a slave; ``has_other``: another replica of its name is master."""
    return [CUT] if has_other else [CUT, NO_OTHER]
