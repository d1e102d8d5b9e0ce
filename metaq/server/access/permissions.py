"""Who may do what: the one question that every handler asks before it acts.

Without users everyone who can connect is ``ANYBODY`` and may do everything, which is why a broker without users listens on
loopback unless it is told otherwise. With users (``metaq.server.access.users``) a connection is that of ``anonymous``, who may
do what the file says, until it logs in or signs what it asks (``metaq.server.access.gate``).
"""

import enum
from collections.abc import Mapping
from typing import Final

from metaq.errors import AccessDenied
from metaq.message import INTERNAL_TOPICS

ANONYMOUS: Final = "anonymous"
RETRY_PREFIX: Final = "%RETRY%"
"""Of the topic in which a group gets its messages again: whoever may consume for the group may use it."""
_KNOWN: Final = 4096
"""Answers that are remembered for each principal, about names of at most"""
_LONGEST_NAME: Final = 255
"""characters, which no topic or group exceeds: nobody fills memory with what they ask for."""


class Action(enum.Enum):
    """What a principal wants to do; the resource is a topic, a group, or empty for any topic or the broker itself."""

    PUBLISH = "publish to"
    SUBSCRIBE = "read"
    CONSUME = "consume for"
    CREATE = "create"
    LOCATE = "ask for the brokers of"
    INSPECT = "look into"
    """Names and numbers of topics, groups and clients; no message."""
    ADMINISTER = "administer"
    """Change topics, groups, the offsets of others, and settings."""


class Permission(enum.Flag):
    """What a line of the users file grants on topics or groups."""

    DENY = 0
    PUB = enum.auto()
    SUB = enum.auto()
    CREATE = enum.auto()


_NEEDED: Final = {
    Action.PUBLISH: Permission.PUB,
    Action.SUBSCRIBE: Permission.SUB,
    Action.CREATE: Permission.CREATE,
    Action.LOCATE: Permission.PUB | Permission.SUB | Permission.CREATE,
}
Grants = Mapping[str, Permission]
"""By a name, or by the beginning of names and ``*``. The name itself counts before the longest beginning that fits."""


class Principal:
    """Somebody who asks. It stays the same object when the users file changes, so that sessions need not be looked for."""

    __slots__ = ("_groups", "_known", "_topics", "admin", "name", "named")

    def __init__(self, name: str, *, admin: bool = False) -> None:
        """Without grants; ``admin`` may do everything."""
        self.name = name
        self.admin = admin
        self.named = name != ANONYMOUS
        """Has logged in, and is still a user."""
        self._topics: Grants = {}
        self._groups: Grants = {}
        self._known: dict[tuple[Action, str], bool] = {}

    def __str__(self) -> str:
        return self.name

    def become(self, topics: Grants, groups: Grants, *, admin: bool) -> None:
        """May do this from now on."""
        self.admin, self.named = admin, self.name != ANONYMOUS
        self._topics, self._groups = topics, groups
        self._known.clear()

    def end(self) -> None:
        """Is a user no more, and may do nothing."""
        self.become({}, {}, admin=False)
        self.named = False  # nothing has been asked since

    def may(self, action: Action, resource: str) -> bool:
        """Whether it may do this; ``allowed`` asks it of those who are no administrators."""
        if len(resource) > _LONGEST_NAME:
            return self._look_up(action, resource)
        known = self._known.get((action, resource))
        if known is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            known = self._known[action, resource] = self._look_up(action, resource)
        return known

    def may_somewhere(self, action: Action) -> bool:
        """Whether there is anything to which it may do this."""
        if self.admin:
            return True
        if action is not Action.CONSUME and self.may(action, ""):
            return True
        # a group's retry topic may be used like any other by whoever may consume for the group
        return action not in (Action.INSPECT, Action.ADMINISTER) and any(Permission.SUB in it for it in self._groups.values())

    def _look_up(self, action: Action, resource: str) -> bool:
        if action is Action.CONSUME:
            return Permission.SUB in _find(self._groups, resource)
        if action is Action.INSPECT:
            return self.named
        if action is Action.ADMINISTER or resource in INTERNAL_TOPICS:
            return False
        if action is Action.LOCATE and self.named:
            return True
        if not resource:
            return any(_NEEDED[action] & grant for grant in self._topics.values())
        if resource.startswith(RETRY_PREFIX):
            return Permission.SUB in _find(self._groups, resource.removeprefix(RETRY_PREFIX))
        return bool(_NEEDED[action] & _find(self._topics, resource))


def _find(grants: Grants, name: str) -> Permission:
    if name in grants:
        return grants[name]
    fitting = [pattern for pattern in grants if pattern.endswith("*") and name.startswith(pattern[:-1])]
    return grants[max(fitting, key=len)] if fitting else Permission.DENY


ANYBODY: Final = Principal(ANONYMOUS, admin=True)
"""Everyone, while there are no users."""


def allowed(principal: Principal, action: Action, resource: str) -> bool:
    """Whether the principal may do this to the resource."""
    return principal.admin or principal.may(action, resource)


def demand(principal: Principal, action: Action, resource: str = "") -> None:
    """Raise ``AccessDenied`` when it is not allowed."""
    if not (principal.admin or principal.may(action, resource)):
        raise denied(principal, action, resource)


_ANYTHING: Final = {
    **dict.fromkeys((Action.PUBLISH, Action.SUBSCRIBE, Action.CREATE, Action.LOCATE), "any topic"),
    Action.CONSUME: "any group",
    **dict.fromkeys((Action.INSPECT, Action.ADMINISTER), "this broker"),
}


def denied(principal: Principal, action: Action, resource: str = "") -> AccessDenied:
    """What is answered to somebody who may not; without a resource: to anything."""
    hint = "" if principal.named else "; log in first"
    named = resource if len(resource) <= _LONGEST_NAME else f"{resource[:_LONGEST_NAME]}…"
    whose = f"the group {named}" if action is Action.CONSUME else named
    return AccessDenied(f"{principal} may not {action.value} {whose if resource else _ANYTHING[action]}{hint}")
