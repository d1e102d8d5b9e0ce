"""Authorization: the check that every handler makes before it acts.

Without users, every client is ``ANYBODY`` and may do everything. That is why a broker without users listens on loopback unless
configured otherwise. With users (``metaq.server.access.users``), a connection has the rights of ``anonymous``, which the file
defines, until it logs in or signs its requests (``metaq.server.access.authentication``).
"""

import enum
from collections.abc import Mapping
from typing import Final

from metaq.errors import AccessDenied
from metaq.message import INTERNAL_TOPICS, RETRY_PREFIX

ANONYMOUS: Final = "anonymous"
"""Prefix of a group's retry topic, which every principal that may consume for the group may use."""
_KNOWN: Final = 4096
"""Results that are remembered for each principal, for names of at most"""
_LONGEST_NAME: Final = 255
"""characters, which no topic or group exceeds: no client can fill memory by the names that it asks for."""


class Action(enum.Enum):
    """An action to be permitted. The resource is a topic or a group; empty means any topic, or the broker itself."""

    PUBLISH = "publish to"
    SUBSCRIBE = "read"
    CONSUME = "consume for"
    CREATE = "create"
    LOCATE = "ask for the brokers of"
    INSPECT = "look into"
    """Read names and numbers of topics, groups and clients, but no messages."""
    ADMINISTER = "administer"
    """Change topics, groups, the offsets of others, and settings."""


class Permission(enum.Flag):
    """The rights that a line of the users file grants on topics or groups."""

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
"""Permissions by name, or by prefix with a trailing ``*``. The exact name counts first, then the longest prefix that fits."""


class Principal:
    """A client's identity. It stays the same object when the users file changes, so that no session has to be updated."""

    __slots__ = ("_groups", "_known", "_topics", "admin", "name", "named")

    def __init__(self, name: str, *, admin: bool = False) -> None:
        """Make a principal without grants; ``admin`` may do everything."""
        self.name = name
        self.admin = admin
        self.named = name != ANONYMOUS
        """True while it is a user that has logged in."""
        self._topics: Grants = {}
        self._groups: Grants = {}
        self._known: dict[tuple[Action, str], bool] = {}

    def __str__(self) -> str:
        return self.name

    def become(self, topics: Grants, groups: Grants, *, admin: bool) -> None:
        """Replace the rights."""
        self.admin, self.named = admin, self.name != ANONYMOUS
        self._topics, self._groups = topics, groups
        self._known.clear()

    def end(self) -> None:
        """Remove all rights: the user no longer exists."""
        self.become({}, {}, admin=False)
        self.named = False  # no check can run between these two lines

    def may(self, action: Action, resource: str) -> bool:
        """Return whether the action is granted. It does not consider ``admin``; ``allowed`` does."""
        if len(resource) > _LONGEST_NAME:
            return self._look_up(action, resource)
        known = self._known.get((action, resource))
        if known is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            known = self._known[action, resource] = self._look_up(action, resource)
        return known

    def may_somewhere(self, action: Action) -> bool:
        """Return whether the action is allowed on any resource at all."""
        if self.admin:
            return True
        if action is not Action.CONSUME and self.may(action, ""):
            return True
        # a principal that may consume for a group may use the group's retry topic like any other topic
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
"""The principal of all clients while there are no users."""


def allowed(principal: Principal, action: Action, resource: str) -> bool:
    """Return whether the principal may perform the action on the resource."""
    return principal.admin or principal.may(action, resource)


def demand(principal: Principal, action: Action, resource: str = "") -> None:
    """Raise ``AccessDenied`` when the action is not allowed."""
    if not (principal.admin or principal.may(action, resource)):
        raise denied(principal, action, resource)


_ANYTHING: Final = {
    **dict.fromkeys((Action.PUBLISH, Action.SUBSCRIBE, Action.CREATE, Action.LOCATE), "any topic"),
    Action.CONSUME: "any group",
    **dict.fromkeys((Action.INSPECT, Action.ADMINISTER), "this broker"),
}


def denied(principal: Principal, action: Action, resource: str = "") -> AccessDenied:
    """Return the error for an action that is not allowed; without a resource, one that is not allowed on any."""
    hint = "" if principal.named else "; log in first"
    named = resource if len(resource) <= _LONGEST_NAME else f"{resource[:_LONGEST_NAME]}…"
    whose = f"the group {named}" if action is Action.CONSUME else named
    return AccessDenied(f"{principal} may not {action.value} {whose if resource else _ANYTHING[action]}{hint}")
