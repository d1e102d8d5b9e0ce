"""Says who asks: by the signature of a request, by name and password, or by neither.

There is one gate for all ports of a process. It reads the users file at the start, and again when that has changed; a file that
cannot be used leaves the users as they were. What each may do is another question (``metaq.server.access.permissions``).
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from gevent.event import Event
from gevent.lock import BoundedSemaphore

from metaq.config import Settings
from metaq.engine.pool import run_in_pool
from metaq.errors import AccessDenied, ConfigError, Overloaded
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.signature import ACCESS_KEY, Credentials, is_signed_with
from metaq.replication.peers import Peers
from metaq.server.access.guesses import Guesses, Taken
from metaq.server.access.permissions import ANONYMOUS, ANYBODY, Principal
from metaq.server.access.users import MOST_PASSWORD, User, credentials, load_users, no_user

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Pause between two looks whether the users file has changed."""
MOST_CHECKS: Final = 2
"""Passwords that are compared with hashes at once: each takes 16 MiB and a processor."""
MOST_WAITING: Final = 64
RETRY_MS: Final = 1000
_REMEMBERED: Final = 256

WRONG: Final = "wrong user or password"
WRONG_SIGNATURE: Final = "wrong signature, or no user with a secret"
_NO_NAME: Final = ""
"""Of whoever has said a secret alone; no user is called so."""


class Caller(Protocol):
    """A connection whose requests are signed."""

    address: Any
    """Host and port first."""
    principal: Principal


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
        self._own_secret = secrets.token_hex(32)
        self._remembered: dict[bytes, User] = {}
        self._checking: dict[bytes, Event] = {}
        self._nobody = User()
        self.anonymous = ANYBODY
        """Who has not logged in."""
        if self._path is not None:
            self.anonymous = self._principals[ANONYMOUS] = Principal(ANONYMOUS)
            self._stamp = self._stamp_now(self._path)
            self._take(load_users(self._path))
            self._nobody = no_user()

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
        for name in self._principals.keys() - users.keys():
            self._principals[name].end()
            if name != ANONYMOUS:  # who gets this name later is somebody else, and has to log in
                del self._principals[name]
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

    def identify(self, caller: Caller, request: RemotingCommand) -> None:
        """Take the caller for whoever signed the request; ``AccessDenied`` when the signature is wrong.

        A body may have megabytes: before the signature of somebody new is computed, it is asked whether one may be looked at.
        """
        if self._path is None:
            return
        name = request.fields.get(ACCESS_KEY)
        if name is None:
            caller.principal = self.anonymous
            return
        user, principal, address = self._users.get(name), self._principals.get(name), caller.address[0]
        secret = None if user is None else user.secret
        is_new = secret is None or caller.principal is not principal
        taken = self._guesses.take(address, name) if is_new else ()
        proof = self._own_secret if secret is None else secret.get_secret_value()
        right = is_signed_with(proof, request.fields, request.body)
        if secret is None or principal is None or not right:
            if not is_new:
                self._guesses.take(address, name)
            logger.warning("signature refused user=%.64r address=%s code=%d", name, address, request.code)
            raise AccessDenied(f"AccessKey {name[:64]!r}: {WRONG_SIGNATURE}")
        if is_new:
            self._guesses.was_right(address, name, taken)
            caller.principal = principal

    # -- passwords ----------------------------------------------------------------------------------------------------

    def check(self, name: str, password: str, address: str) -> Principal:
        """Whose name and password these are; the secret of a user is a password, too. May wait some 0.1 s.

        ``AccessDenied`` when they are wrong, or too many were wrong before; ``Overloaded`` when too many are being checked.
        """
        if self._path is None:
            return self.anonymous
        digest = hmac.digest(self._own_key, f"{name}\0{password}".encode(), hashlib.sha256)
        while not self._is_remembered(name, digest):
            checked = self._checking.get(digest)
            if checked is None:
                self._check_now(name, password, address, digest)
                break
            checked.wait()  # many clients of one machine begin at once
        return self._principals[name]

    def _is_remembered(self, name: str, digest: bytes) -> bool:
        user = self._users.get(name)
        return user is not None and self._remembered.get(digest) is user

    def _check_now(self, name: str, password: str, address: str, digest: bytes) -> None:
        taken = self._guesses.take(address, name)
        checked = self._checking[digest] = Event()
        try:
            user = self._who_proves(name, password)
        except Overloaded:
            self._guesses.give_back(taken)
            raise
        finally:
            del self._checking[digest]
            checked.set()
        if user is None:
            logger.warning("login refused user=%.64r address=%s", name, address)
            raise AccessDenied(WRONG)
        self._guesses.was_right(address, name, taken)
        if len(self._remembered) >= _REMEMBERED:
            self._remembered.clear()
        self._remembered[digest] = user

    def holder(self, secret: str, address: str) -> Principal:
        """Whose secret this is, as a token that stands without a name; ``AccessDenied``."""
        asked = [name for name, user in self._users.items() if user.secret is not None]
        try:
            taken = [self._guesses.take(address, _NO_NAME)]
        except AccessDenied:  # whoever was right there before is counted apart, and nobody else can be found
            known = self._take_of_known(asked, address)
            if not known:
                raise
            asked, taken = list(known), list(known.values())
        found = [name for name in asked if self._users[name].proves(secret)]  # looks at all, however early one is right
        if not found:
            logger.warning("login refused user=%.64r address=%s", _NO_NAME, address)
            raise AccessDenied(WRONG)
        for each in taken:
            self._guesses.give_back(each)
        self._guesses.remember(address, found[0])
        return self._principals[found[0]]

    def _take_of_known(self, names: Sequence[str], address: str) -> dict[str, Taken]:
        """Of those who were right at this address and whose secret may be looked at."""
        taken = {}
        for name in names:
            if self._guesses.knows(address, name):
                with suppress(AccessDenied):  # who guesses one secret keeps nobody from another
                    taken[name] = self._guesses.take(address, name)
        return taken

    def _who_proves(self, name: str, password: str) -> User | None:
        """Who has this name and password. Nobody of that name takes as long as a wrong password, whatever is kept of it."""
        if len(password) > MOST_PASSWORD:
            return None
        while True:
            users = self._users
            user = users.get(name)
            if user is not None and user.secret is not None and user.proves(password):
                return user
            right = self._has_hash(user if user is not None and user.password is not None else self._nobody, password)
            if self._users is users:  # else they were read again meanwhile
                return user if right else None

    def _has_hash(self, user: User, password: str) -> bool:
        if self._waiting >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} passwords wait for their check already", retry_after_ms=RETRY_MS)
        self._waiting += 1
        try:
            with self._line:
                return run_in_pool(lambda: user.proves(password))
        finally:
            self._waiting -= 1

    # -- slaves -------------------------------------------------------------------------------------------------------

    def secret_of(self, name: str, address: str, proves: Callable[[str], bool]) -> str | None:
        """What an administrator proves itself with to its peer, when it does; ``AccessDenied`` when too much was wrong before.

        Of somebody who is none a secret is looked at that nobody knows.
        """
        taken = self._guesses.take(address, name)
        user = self._users.get(name)
        known = user.secret.get_secret_value() if user is not None and user.secret is not None and user.admin else None
        secret = known or secrets.token_hex(32)
        if not proves(secret):
            return None
        self._guesses.was_right(address, name, taken)
        return secret
