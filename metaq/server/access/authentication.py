"""Authentication: by the signature of a request, by name and password, or as ``anonymous``.

All ports of a process share it. The users file is read at the start, and again whenever it has changed; a file with errors
leaves the users as they were. ``metaq.server.access.permissions`` decides what each user may do.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Mapping
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
from metaq.server.access.guesses import Guesses
from metaq.server.access.logins import Logins
from metaq.server.access.permissions import ANONYMOUS, ANYBODY, Principal
from metaq.server.access.users import MOST_PASSWORD, User, credentials, no_user

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Interval between checks for a changed users file."""
MOST_CHECKS: Final = 2
"""Passwords compared with hashes at once: each takes 16 MiB and a processor."""
MOST_WAITING: Final = 64
RETRY_MS: Final = 1000
_REMEMBERED: Final = 256

WRONG: Final = "wrong user or password"
WRONG_SIGNATURE: Final = "wrong signature, or no user with a secret"
_NO_NAME: Final = ""
"""Stands for the name of a client that has sent only a secret; no user can have this name."""


class Caller(Protocol):
    """A connection whose requests are signed."""

    address: Any
    """Host and port come first."""
    principal: Principal


class Authentication:
    """The users of one process, and the proof of who a client is."""

    def __init__(self, users_file: str, failed_logins_per_minute: int, now: Callable[[], float]) -> None:
        """Load the users. Raise ``ConfigError`` when the file cannot be used.

        Without a file there are no users, and everybody may do everything.
        """
        self._path = Path(users_file) if users_file else None
        self._guesses = Guesses(failed_logins_per_minute, now)
        self.logins = Logins(now)
        """Logins that last, as the console has them."""
        self._users: dict[str, User] = {}
        self._principals: dict[str, Principal] = {}
        self._stamp: tuple[int, ...] = ()
        self.version = 0
        """Changes when users are read: what was found out about a client by then has to be found out again."""
        self._problem = ""
        self._line = BoundedSemaphore(MOST_CHECKS)
        self._waiting = 0
        self._own_key = secrets.token_bytes(32)
        self._own_secret = secrets.token_hex(32)
        self._remembered: dict[bytes, User] = {}
        self._checking: dict[bytes, Event] = {}
        self._nobody = User()
        self.anonymous = ANYBODY
        """The principal of a connection that has not logged in."""
        if self._path is not None:
            self.anonymous = self._principals[ANONYMOUS] = Principal(ANONYMOUS)
            self._stamp = self._stamp_now(self._path)
            self._take(_load(self._path))
            self._nobody = no_user()

    @property
    def has_users(self) -> bool:
        return self._path is not None

    @property
    def users(self) -> Mapping[str, User]:
        """The users of the file by name, with their secrets."""
        return self._users

    # -- the file -----------------------------------------------------------------------------------------------------

    def reload_if_changed(self) -> None:
        """Read the users again if their file has changed."""
        if self._path is not None and (stamp := self._stamp_now(self._path)) != self._stamp:
            self._stamp = stamp
            self.reload()

    def reload(self) -> None:
        """Read the users again. If the file has an error, log it and keep the users as they were."""
        if self._path is None:
            return
        try:
            users = _load(self._path)
        except ConfigError as error:
            if str(error) != self._problem:
                logger.error("users not reloaded, those before stay reason=%s", error)
            self._problem = str(error)
            if isinstance(error.__cause__, OSError):  # what kept it from being read may pass, and leave the file as it is
                self._stamp = ()
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
        self.version += 1
        self._remembered.clear()
        for name in self._principals.keys() - users.keys():
            self._principals[name].end()
            if name != ANONYMOUS:  # a later user of the same name is a different one, and has to log in
                del self._principals[name]
        for name, user in users.items():
            self._principals.setdefault(name, Principal(name)).become(user.topics, user.groups, admin=user.admin)

    def peers(self, settings: Settings) -> Peers:
        """Return how this process connects to registries and masters.

        Raise ``ConfigError`` when ``cluster_user`` cannot sign.
        """
        name = settings.cluster_user

        def own() -> Credentials | None:
            return credentials(self._users, "cluster_user", name) if name else None

        own()
        return Peers(own, settings.cluster_tls_ca)

    # -- signatures ---------------------------------------------------------------------------------------------------

    def identify(self, caller: Caller, request: RemotingCommand) -> None:
        """Set the caller's principal to the user that signed the request. Raise ``AccessDenied`` when the signature is wrong.

        A body may have megabytes. So before a signature of a user that is new on this connection is computed, the limit on
        failures is checked.
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
        proof = self._own_secret if secret is None else secret
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
        """Return the user with this name and password; a user's secret counts as a password too. May wait for some 0.1 s.

        Raise ``AccessDenied`` when they are wrong, or when too many were wrong before; ``Overloaded`` when too many are being
        checked.
        """
        if self._path is None:
            return self.anonymous
        digest = hmac.digest(self._own_key, f"{name}\0{password}".encode(), hashlib.sha256)
        while not self._is_remembered(name, digest):
            checked = self._checking.get(digest)
            if checked is None:
                self._check_now(name, password, address, digest)
                return self._principals[name]
            checked.wait()  # many clients of one machine start at the same time
        self._guesses.was_right(address, name, self._guesses.take(address, name))  # without a hash it is a guess all the same
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

    def log_in(self, name: str, password: str, address: str) -> str:
        """Return the token of a new login that lasts. Raise what ``check`` raises."""
        self.check(name, password, address)
        return self.logins.begin(name, self._users[name])

    def logged_in(self, token: str, *, used: bool) -> Principal | None:
        """Return the user whose login has this token, or ``None`` when it has ended (``Logins.find``)."""
        name = self.logins.find(token, self._users.get, used=used)
        return None if name is None else self._principals[name]

    def holder(self, secret: str, address: str) -> Principal:
        """Return the user that has this secret, sent as a token without a name.

        Raise ``AccessDenied`` when there is none, or after too many failures.
        """
        asked = [name for name, user in self._users.items() if user.secret is not None]
        try:
            taken = self._guesses.take(address, _NO_NAME)
        except AccessDenied:  # users who logged in from there before have a limit of their own; only they can be found now
            asked = [name for name in asked if self._guesses.knows(address, name)]
            if not asked:
                raise
            taken = self._guesses.take_for_known(address)
        found = [name for name in asked if self._users[name].proves(secret)]  # compares with all: timing reveals no match
        if not found:
            logger.warning("login refused user=%.64r address=%s", _NO_NAME, address)
            raise AccessDenied(WRONG)
        self._guesses.was_right(address, found[0], taken)
        return self._principals[found[0]]

    def _who_proves(self, name: str, password: str) -> User | None:
        """Return the user with this name and password, or ``None``.

        An unknown name takes as long as a wrong password, whether or not the user's own proof is a hash.
        """
        if len(password) > MOST_PASSWORD:
            return None
        while True:
            users = self._users
            user = users.get(name)
            if user is not None and user.secret is not None and user.proves(password):
                return user
            right = self._has_hash(user if user is not None and user.password is not None else self._nobody, password)
            if self._users is users:  # otherwise the users were read again meanwhile
                return user if right else None

    def _has_hash(self, user: User, password: str) -> bool:
        if self._waiting >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} passwords already wait to be checked", retry_after_ms=RETRY_MS)
        self._waiting += 1
        try:
            with self._line:
                return run_in_pool(lambda: user.proves(password))
        finally:
            self._waiting -= 1

    # -- slaves -------------------------------------------------------------------------------------------------------

    def secret_of(self, name: str, address: str, proves: Callable[[str], bool]) -> str | None:
        """Return the secret with which an administrator proves itself to its peer, or ``None`` when it does not. Raise
        ``AccessDenied`` after too many failures.

        For a name that is not an administrator's, the proof is checked against a random secret.
        """
        taken = self._guesses.take(address, name)
        user = self._users.get(name)
        known = user.secret if user is not None and user.secret is not None and user.admin else None
        secret = known or secrets.token_hex(32)
        if not proves(secret):
            return None
        self._guesses.was_right(address, name, taken)
        return secret


def _load(path: Path) -> dict[str, User]:
    """Return the users in the file. Raise ``ConfigError``."""
    from metaq.server.access.usersfile import load_users  # noqa: PLC0415 - brings YAML, which a broker without users does not need

    return load_users(path)
