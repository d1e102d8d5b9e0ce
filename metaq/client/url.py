"""PURE: URLs of registries, with user, password and parameters."""

from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from metaq.errors import BadRequest

SCHEME: Final = "metaq"
ZOOKEEPER_SCHEME: Final = "zk"
_PARAMETERS: Final = frozenset({"timeout_s", "instance", "tls"})


class RegistryUrl(NamedTuple):
    """A URL, taken apart."""

    hosts: str
    is_zookeeper: bool
    """True when the hosts are those of ZooKeeper, not registries."""
    user: str
    password: str
    parameters: Mapping[str, str]
    """Those that are given, of ``timeout_s``, ``instance`` and ``tls``."""


def read_url(text: str) -> RegistryUrl:
    """Take a URL apart; ``BadRequest``, without user and password, for one that is none of a registry or ZooKeeper."""
    url = urlsplit(text)
    unknown = dict(parse_qsl(url.query, keep_blank_values=True)).keys() - _PARAMETERS
    if "@" in url.path + url.fragment or (unknown and "@" in url.query):  # what stands before it is of a password
        marks = "%2F for /, %3F for ?, %23 for # and %40 for @"
        raise BadRequest(f"the URL has an @ after its hosts; in user and password write {marks}")
    who, _, hosts = url.netloc.rpartition("@")
    shown = f"{url.scheme}://{hosts}"
    if url.scheme not in {SCHEME, ZOOKEEPER_SCHEME}:
        schemes = f"{SCHEME}://, {ZOOKEEPER_SCHEME}:// for ZooKeeper, or no scheme at all"
        raise BadRequest(f"{shown!r} begins with {url.scheme}://; write {schemes}")
    if url.path not in {"", "/"}:
        raise BadRequest(f"{shown!r} has the path {url.path}; leave it out")
    if unknown:
        raise BadRequest(f"{shown!r} has the unknown parameter {min(unknown)}; there are timeout_s, instance and tls")
    user, password = map(unquote, who.partition(":")[::2])
    return RegistryUrl(hosts, url.scheme == ZOOKEEPER_SCHEME, user, password, dict(parse_qsl(url.query)))
