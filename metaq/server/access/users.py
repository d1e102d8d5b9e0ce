"""The users file: the users, their secrets or password hashes, and their rights.

::

    users:
      anonymous:                   # who has not logged in; without this entry such a one may do nothing
        topics: {public-news: SUB}
        groups: {"*": SUB}
      billing:
        secret: 4b8f0c…            # signs requests, and is a password too
        topics: {orders: SUB, "audit-*": PUB|CREATE}
        groups: {billing: SUB}
      ann:
        password: scrypt$14$…$…    # a hash: opens the text protocol and HTTP, and signs nothing
        admin: true

``topics`` and ``groups`` grant by name, or by prefix with a trailing ``*``; ``*`` alone is the default. The words PUB, SUB and
DENY, joined by ``|``, are those of RocketMQ's plain_acl.yml. CREATE is metaq's own: it allows creating a topic, also by sending
to it.

To check a signature, the broker needs the secret itself. So secrets stand in the file as they are, and a file that others can
read is refused. Users that never sign are better kept with a password hash.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from metaq.errors import ConfigError
from metaq.fields import declare
from metaq.protocol.remoting.signature import Credentials
from metaq.server.access.permissions import Permission

SCRYPT_LOG2_N: Final = 14
"""16 MiB and some 40 ms for one try, with r = 8 and p = 1."""
_SCRYPT_R: Final = 8
_HASH: Final = "scrypt"
MOST_PASSWORD: Final = 256
"""Characters."""
LEAST_SECRET: Final = 7
"""Characters; RocketMQ refuses shorter ones."""
_NAME_ALPHABET: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def parse_permission(text: object) -> Permission:
    """Return the permission for a text such as ``PUB|SUB``. Raise ``ValueError`` with the word that is unknown."""
    if isinstance(text, Permission):
        return text
    found = Permission.DENY
    for word in str(text).split("|"):
        known = Permission.__members__.get(word.strip().upper())
        if known is None:
            raise ValueError(f"{word.strip()!r} is not a permission; use {', '.join(Permission.__members__)}, joined by |")
        found |= known
    return found


def written_permission(permission: Permission) -> str:
    """Return the permission as the users file writes it."""
    return "|".join(str(word.name) for word in Permission if word in permission) or "DENY"


@dataclass(frozen=True, kw_only=True)
class User:
    """One entry of the file."""

    secret: str | None = declare(None, description="signs requests, and is a password too", repr=False)
    password: str | None = declare(None, description="a hash made by ``hashed``", repr=False)
    admin: bool = declare(False, description="whether everything is allowed")
    topics: dict[str, Permission] = declare({}, description="permissions by topic", convert=parse_permission)
    groups: dict[str, Permission] = declare({}, description="permissions by group", convert=parse_permission)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless there is one proof at most, and it is a good one."""
        if self.secret is not None and self.password is not None:
            raise ValueError("has a secret and a password; one of them is enough")
        if self.secret is not None and not LEAST_SECRET <= len(self.secret) <= MOST_PASSWORD:
            raise ValueError(f"the secret must have {LEAST_SECRET} to {MOST_PASSWORD} characters")
        if self.password is not None:
            _parts(self.password)

    def proves(self, password: str) -> bool:
        """Return whether this is the password.

        With a hash that takes some 40 ms of a processor, without the interpreter's lock.
        """
        if self.secret is not None:
            return hmac.compare_digest(self.secret.encode(), password.encode())
        if self.password is None:
            return False
        log2_n, salt, expected = _parts(self.password)
        return hmac.compare_digest(_scrypt(password, log2_n, salt), expected)


def is_name(name: str) -> bool:
    """Return whether a user may have this name."""
    return 0 < len(name) <= 64 and _NAME_ALPHABET.issuperset(name)


def hashed(password: str) -> str:
    """Return the hash of a password for the file: ``scrypt$LOG2_N$SALT$HASH``, the last two in Base64."""
    salt = secrets.token_bytes(16)
    parts = (salt, _scrypt(password, SCRYPT_LOG2_N, salt))
    return "$".join((_HASH, str(SCRYPT_LOG2_N), *(base64.b64encode(part).decode() for part in parts)))


def no_user() -> User:
    """Return a user with a random password, to be checked in place of one that does not exist, so that both take as long.

    Takes some 40 ms.
    """
    return User(password=hashed(secrets.token_hex(16)))


def _parts(text: str) -> tuple[int, bytes, bytes]:
    """Return log2 of the cost, the salt and the hash. Raise ``ValueError`` when the text is no such hash."""
    kind, _, rest = text.partition("$")
    log2_n, _, rest = rest.partition("$")
    salt, _, expected = rest.partition("$")
    if kind != _HASH or not log2_n.isdecimal() or not 10 <= int(log2_n) <= 18 or not salt or not expected:
        raise ValueError("the password is not a hash; `metaq user add` makes one")
    return int(log2_n), base64.b64decode(salt, validate=True), base64.b64decode(expected, validate=True)


def _scrypt(password: str, log2_n: int, salt: bytes) -> bytes:
    memory = 256 * _SCRYPT_R * (1 << log2_n)  # OpenSSL's default limit is 32 MiB
    return hashlib.scrypt(password.encode(), salt=salt, n=1 << log2_n, r=_SCRYPT_R, p=1, maxmem=memory, dklen=32)


def credentials(users: Mapping[str, User], option: str, name: str) -> Credentials:
    """Return the credentials with which a user signs.

    Raise ``ConfigError`` with the name of ``option`` when it is no user with a secret.
    """
    user = users.get(name)
    if user is None or user.secret is None:
        raise ConfigError(f"{option} {name!r} is not a user with a secret in the users file")
    return Credentials(name, user.secret)
