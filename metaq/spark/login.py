"""The user of a read or a write, and the certificates it checks brokers with: its options ``metaq.user`` and the like."""

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from metaq.client.connecting.access import Access
from metaq.errors import ConfigError

USER: Final = "metaq.user"
PASSWORD: Final = "metaq.password"  # noqa: S105 - a name
TLS_CA: Final = "metaq.tls.ca"
ENVIRONMENT: Final = "METAQ_PASSWORD"
"""The environment variable with the password, for options without one."""


class Login(NamedTuple):
    """User, password and certificates, which are pickled into tasks. The password is never shown."""

    user: str = ""
    password: str = ""
    tls_ca: str = ""
    """A file (PEM); empty for no TLS."""

    def __repr__(self) -> str:
        return f"Login({self.user!r}, …, {self.tls_ca!r})"

    def for_client(self) -> dict[str, Any]:
        """Return the arguments for ``metaq.connect``."""
        return {"user": self.user, "password": self.password, "tls": self.tls_ca or False}

    def access(self) -> Access:
        """Return the same for a connection. ``BadRequest`` for certificates that cannot be read here."""
        return Access(**self.for_client())


NOBODY: Final = Login()


def login(user: str, password: str, tls_ca: str) -> Login:
    """Return a login whose parts fit together. ``ConfigError`` names the option that is missing."""
    if user and not password:
        raise ConfigError(f"{USER}: there is no password; set {PASSWORD}, or {ENVIRONMENT} in the driver's environment")
    if password and not user:
        raise ConfigError(f"{PASSWORD}: there is no {USER}")
    return Login(user, password, tls_ca)


def from_environment(user: str, tls_ca: str) -> Login:
    """Return a login with the password from this process's environment. ``ConfigError`` when that has none."""
    return login(user, os.environ.get(ENVIRONMENT, "") if user else "", tls_ca)


def with_password(options: Mapping[str, str]) -> dict[str, str]:
    """Return options with the password from the environment, if they name a user and no password."""
    found = {name.lower(): value for name, value in options.items()}
    if found.get(USER) and not found.get(PASSWORD) and ENVIRONMENT in os.environ:
        found[PASSWORD] = os.environ[ENVIRONMENT]
    return found


def check_servers(option: str, servers: str) -> None:
    """Raise ``ConfigError`` for an address with a login or TLS in it: plans show it, and workers connect without it."""
    if "://" not in servers:
        return
    url = urlsplit(servers)
    if "@" in url.netloc:
        raise ConfigError(
            f"{option}: the address has a user or a password, and plans show addresses; use {USER} and {PASSWORD}"
        )
    if "tls" in parse_qs(url.query, keep_blank_values=True):
        raise ConfigError(f"{option}: use {TLS_CA} instead of tls= in the address")
