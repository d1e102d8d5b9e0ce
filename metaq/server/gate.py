"""Says who asks: by the signature of a request, by name and password, or by neither.

There is one gate for all ports of a process. It reads the users file at the start, and again when that has changed; a file that
cannot be used leaves the users as they were. What each may do is another question (``metaq.server.permissions``).
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from gevent.lock import BoundedSemaphore

from metaq.config import Settings
from metaq.errors import AccessDenied, ConfigError, Overloaded
from metaq.protocol.remoting import RemotingCommand
from metaq.protocol.signature import ACCESS_KEY, Credentials, is_signed_with
from metaq.replication.peers import Peers
from metaq.server.guesses import Guesses
from metaq.server.permissions import ANONYMOUS, ANYBODY, Principal
from metaq.server.pool import run_in_pool
from metaq.server.remoting import RemotingSession, failure
from metaq.server.users import MOST_PASSWORD, User, credentials, load_users, no_user

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Pause between two looks whether the users file has changed."""
MOST_CHECKS: Final = 2
"""Passwords that are compared with hashes at once: each takes 16 MiB and a processor."""
MOST_WAITING: Final = 64
RETRY_MS: Final = 1000
_REMEMBERED: Final = 256

Sends = Callable[[RemotingSession, Sequence[RemotingCommand], int], int]
WRONG: Final = "wrong user or password"


class Gate:
    """The users of one process."""

    def __init__(self, users_file: str, failed_logins_per_minute: int, now: Callable[[], float]) -> None:
        """``ConfigError`` when the file cannot be used. Without a file there are no users, and everybody may do everything."""
        self._path = Path(users_file) if users_file else None
        self._guesses = Guesses(failed_logins_per_minute, now)
        self._users: dict[str, User] = {}
        self._principals: dict[str, Principal] = {}
        self._stamp: tuple[int, ...] = ()
        self._problem = ""
        self._line = BoundedSemaphore(MOST_CHECKS)
        self._waiting = 0
        self._own_key = secrets.token_bytes(32)
        self._remembered: dict[bytes, User] = {}
        self.anonymous = ANYBODY
        """Who has not logged in."""
        if self._path is not None:
            self.anonymous = self._principals[ANONYMOUS] = Principal(ANONYMOUS)
            self._stamp = self._stamp_now(self._path)
            self._take(load_users(self._path))

    @property
    def has_users(self) -> bool:
        return self._path is not None

    # -- the file -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the users again when their file has changed."""
        if self._path is not None and (stamp := self._stamp_now(self._path)) != self._stamp:
            self._stamp = stamp
            self.reload()

    def reload(self) -> None:
        """Read the users again."""
        if self._path is None:
            return
        try:
            users = load_users(self._path)
        except ConfigError as error:
            if str(error) != self._problem:
                logger.error("users not reloaded, those before stay reason=%s", error)
            self._problem = str(error)
            return
        self._problem = ""
        self._take(users)
        logger.info("users reloaded users=%d file=%s", len(users), self._path)

    @staticmethod
    def _stamp_now(path: Path) -> tuple[int, ...]:
        try:
            found = os.stat(path)
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size

    def _take(self, users: dict[str, User]) -> None:
        self._users = users
        self._remembered.clear()
        for name, principal in self._principals.items():
            if name not in users:
                principal.end()
        for name, user in users.items():
            self._principals.setdefault(name, Principal(name)).become(user.topics, user.groups, admin=user.admin)

    def peers(self, settings: Settings) -> Peers:
        """How this process connects to registries and masters; ``ConfigError`` when ``cluster_user`` cannot sign."""
        name = settings.cluster_user

        def own() -> Credentials | None:
            return credentials(self._users, "cluster_user", name) if name else None

        own()
        return Peers(own, settings.cluster_tls_ca)

    # -- signatures ---------------------------------------------------------------------------------------------------

    def identify(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Take the session for whoever signed the request; ``AccessDenied`` when the signature is wrong."""
        if self._path is None:
            return
        name = request.fields.get(ACCESS_KEY)
        if name is None:
            session.principal = self.anonymous
            return
        user, principal = self._users.get(name), self._principals.get(name)
        secret = None if user is None else user.secret
        right = secret is not None and is_signed_with(secret.get_secret_value(), request.fields, request.body)
        if right and session.principal is principal:  # as before on this connection: nothing is guessed
            return
        address = session.address[0]
        self._guesses.take(address, name)
        if secret is None or principal is None or not right:
            logger.warning("signature refused user=%.64r address=%s code=%d", name, address, request.code)
            reason = "wrong signature" if secret is not None else "no user with a secret, which signatures need"
            raise AccessDenied(f"AccessKey {name[:64]!r}: {reason}")
        self._guesses.was_right(address, name)
        session.principal = principal

    def signed(self, sends: Sends) -> Sends:
        """Has the sender of each request identified first."""
        if self._path is None:
            return sends

        def identified(session: RemotingSession, requests: Sequence[RemotingCommand], at: int) -> int:
            request = requests[at]
            try:
                self.identify(session, request)
            except AccessDenied as error:
                session.respond(request, failure(error))
                return at + 1
            return at + sends(session, requests[at : at + 1], 0)

        return identified

    # -- passwords ----------------------------------------------------------------------------------------------------

    def check(self, name: str, password: str, address: str) -> Principal:
        """Whose name and password these are; the secret of a user is a password, too. May wait some 0.1 s.

        ``AccessDenied`` when they are wrong, or too many were wrong before; ``Overloaded`` when too many are being checked.
        """
        if self._path is None:
            return self.anonymous
        user = self._users.get(name)
        digest = hmac.digest(self._own_key, f"{name}\0{password}".encode(), hashlib.sha256)
        if user is not None and self._remembered.get(digest) is user:
            return self._principals[name]
        self._guesses.take(address, name)
        right = len(password) <= MOST_PASSWORD and self._proves(user or no_user(), password)
        if not right or user is None or self._users.get(name) is not user:
            logger.warning("login refused user=%.64r address=%s", name, address)
            raise AccessDenied(WRONG)
        self._guesses.was_right(address, name)
        if len(self._remembered) >= _REMEMBERED:
            self._remembered.clear()
        self._remembered[digest] = user
        return self._principals[name]

    def holder(self, secret: str, address: str) -> Principal:
        """Whose secret this is, as a token that stands without a name; ``AccessDenied``."""
        self._guesses.take(address, "")
        names = [name for name, user in self._users.items() if user.secret is not None and user.proves(secret)]
        if not names:
            logger.warning("login refused user=%.64r address=%s", "", address)
            raise AccessDenied(WRONG)
        self._guesses.was_right(address, "")
        return self._principals[names[0]]

    def _proves(self, user: User, password: str) -> bool:
        if user.secret is not None:
            return user.proves(password)
        if self._waiting >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} passwords wait for their check already", retry_after_ms=RETRY_MS)
        self._waiting += 1
        try:
            with self._line:
                return run_in_pool(lambda: user.proves(password))
        finally:
            self._waiting -= 1

    # -- slaves -------------------------------------------------------------------------------------------------------

    def secret_of(self, name: str, address: str) -> str:
        """What an administrator proves itself with to its peer; ``AccessDenied`` when too much was wrong before.

        For somebody who is none it is a secret that nobody knows.
        """
        self._guesses.take(address, name)
        user = self._users.get(name)
        if user is None or user.secret is None or not user.admin:
            return secrets.token_hex(32)
        return user.secret.get_secret_value()

    def proved(self, name: str, address: str) -> None:
        """It did."""
        self._guesses.was_right(address, name)
