"""The users of this broker and their rights. They are changed in the users file (docs/security.md)."""

import enum
from typing import Annotated

from msgspec import Meta

from metaq.server.access.permissions import Action
from metaq.server.access.users import User, written_permission
from metaq.server.services.call import Call
from metaq.server.services.rows import NamesQuery, Output, RowPage, page_of


class ProofKind(enum.Enum):
    """The ways in which a user proves who it is."""

    SIGNING = "secret"
    HASH = "password"
    NONE = "none"


class UserRow(Output, frozen=True):
    """A user, without its secret."""

    name: str
    admin: Annotated[bool, Meta(description="Whether it may do everything.")]
    proof: Annotated[ProofKind, Meta(description="A `secret` also signs requests; nobody can log in as a user with `none`.")]
    topics: Annotated[dict[str, str], Meta(description="Permissions by topic, or by prefix with a trailing `*`.")]
    groups: Annotated[dict[str, str], Meta(description="Permissions by group, or by prefix.")]


def list_users(call: Call, query: NamesQuery) -> RowPage[UserRow]:
    """Return a page of the users with their rights, by name; none when the broker has no users file."""
    call.demand(Action.ADMINISTER)
    users = call.interior.endpoint.authentication.users
    return page_of(call, sorted(users.items()), query, lambda item: item[0], lambda item: _row(*item))


def _row(name: str, user: User) -> UserRow:
    proof = ProofKind.SIGNING if user.secret is not None else ProofKind.HASH if user.password is not None else ProofKind.NONE
    return UserRow(
        name=name,
        admin=user.admin,
        proof=proof,
        topics={topic: written_permission(permission) for topic, permission in sorted(user.topics.items())},
        groups={group: written_permission(permission) for group, permission in sorted(user.groups.items())},
    )
