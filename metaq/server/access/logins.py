"""Logins that last: who has proven who they are to this process by a password, and for how long that holds.

The console's cookie holds a login's token. All of it is in memory: a restart ends every login, a change of role ends none.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from metaq.server.access.users import User

MOST_LOGINS: Final = 1000
"""When there is one more, the one that was used longest ago ends."""
IDLE_S: Final = 3600.0
"""A login ends when it was not used for so long."""
LONGEST_S: Final = 12 * 3600.0
"""A login ends after this time in any case."""
_TOKEN_BYTES: Final = 32


@dataclass(slots=True)
class _Login:
    name: str
    user: User
    """The user as it was at the login: when its password, secret or rights change, the login ends."""
    began_s: float
    used_s: float


class Logins:
    """The logins of one process."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Begin without logins. ``now`` returns seconds of a clock that never goes back."""
        self._now = now
        self._key = secrets.token_bytes(_TOKEN_BYTES)
        self._logins: dict[bytes, _Login] = {}  # by digest of the token; the first was used longest ago

    def __len__(self) -> int:
        return len(self._logins)

    def begin(self, name: str, user: User) -> str:
        """Begin the login of a user that has proven who it is, and return its token."""
        while len(self._logins) >= MOST_LOGINS:
            del self._logins[next(iter(self._logins))]
        token, now_s = secrets.token_urlsafe(_TOKEN_BYTES), self._now()
        self._logins[_digest(token)] = _Login(name, user, now_s, now_s)
        return token

    def find(self, token: str, user_of: Callable[[str], User | None], *, used: bool) -> str | None:
        """Return the name of the user whose login has this token, or ``None`` when it has ended.

        ``used`` is false for what a page does by itself: that does not keep a login alive.
        """
        digest, now_s = _digest(token), self._now()
        login = self._logins.get(digest)
        if login is None:
            return None
        is_over = now_s - login.used_s > IDLE_S or now_s - login.began_s > LONGEST_S
        if is_over or user_of(login.name) != login.user:
            del self._logins[digest]
            return None
        if used:
            login.used_s = now_s
            self._logins[digest] = self._logins.pop(digest)
        return login.name

    def end(self, token: str) -> None:
        """End a login; nothing when it has ended already."""
        self._logins.pop(_digest(token), None)

    def change_token(self, token: str) -> str:
        """Return what a page of a login has to send with every change; another site cannot know it.

        Without users, ``token`` is empty, and all pages of this process have the same.
        """
        return hmac.digest(self._key, token.encode(), hashlib.sha256).hex()

    def is_change_token(self, token: str, given: str) -> bool:
        """Return whether this is the ``change_token``; the time it takes tells nothing."""
        return hmac.compare_digest(self.change_token(token).encode(), given.encode())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
