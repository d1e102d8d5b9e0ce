"""Who may do what: the one question that every handler asks before it acts.

There are no users yet: everyone who can connect is ``ANONYMOUS`` and may do everything, which is why a broker listens on
loopback unless it is told otherwise.
"""

import enum
from typing import Final

ANONYMOUS: Final = "anonymous"


class Action(enum.Enum):
    """What a principal wants to do; the resource is a topic, or empty for the broker itself."""

    PUBLISH = enum.auto()
    SUBSCRIBE = enum.auto()
    CREATE = enum.auto()
    INSPECT = enum.auto()


def allowed(principal: str, action: Action, resource: str) -> bool:
    """Whether the principal may do this to the resource."""
    return principal == ANONYMOUS
