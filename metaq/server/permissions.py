"""Who may do what: the one question that every handler asks before it acts.

There are no users yet: everyone who can connect is ``ANONYMOUS`` and may do everything, which is why a broker listens on
loopback unless it is told otherwise.
"""

import enum
from typing import Final

from metaq.errors import AccessDenied

ANONYMOUS: Final = "anonymous"


class Action(enum.Enum):
    """What a principal wants to do; the resource is a topic, or empty for the broker itself."""

    PUBLISH = enum.auto()
    SUBSCRIBE = enum.auto()
    CREATE = enum.auto()
    INSPECT = enum.auto()
    ADMINISTER = enum.auto()
    """Change topics, groups, the offsets of others, and settings."""


def allowed(principal: str, action: Action, resource: str) -> bool:
    """Whether the principal may do this to the resource."""
    return principal == ANONYMOUS


def demand(principal: str, action: Action, resource: str = "") -> None:
    """Raise ``AccessDenied`` when it is not allowed."""
    if not allowed(principal, action, resource):
        raise AccessDenied(f"{principal} may not {action.name.lower()} {resource or 'this broker'}")
