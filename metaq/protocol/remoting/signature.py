"""Signatures of requests, as in RocketMQ's ACL (specs: remoting protocol, section 5.10).

A signed request has the fields ``AccessKey``, the name of a user, and ``Signature``::

    Base64(HMAC-SHA1(secret, the values of all other fields sorted by their names, without separators, then the body))

The signature covers the fields and the body as they are sent. It includes neither a time nor a nonce: anyone who sees a signed
request can send it again. So only TLS protects requests that matter.
"""

import base64
import hmac
from collections.abc import Mapping
from typing import Final, NamedTuple

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
UNSIGNED: Final = frozenset((SIGNATURE, "_UNIQUE_KEY_QUERY"))
"""Fields that are not signed. Java clients add the second one after they have signed the request."""


class Credentials(NamedTuple):
    """The name of a user, and the secret that proves it."""

    name: str
    secret: str

    def __repr__(self) -> str:
        return f"Credentials({self.name!r}, …)"

    def signed(self, fields: Mapping[str, str] | None, body: bytes) -> dict[str, str]:
        """Return the fields of a request together with those that sign it."""
        whole = {**(fields or {}), ACCESS_KEY: self.name}
        whole[SIGNATURE] = sign(self.secret, whole, body)
        return whole


def sign(secret: str, fields: Mapping[str, str], body: bytes) -> str:
    """Return the signature of a request whose fields include the access key."""
    values = "".join([fields[name] for name in sorted(fields) if name not in UNSIGNED])
    return base64.b64encode(hmac.digest(secret.encode(), values.encode() + body, "sha1")).decode()


def is_signed_with(secret: str, fields: Mapping[str, str], body: bytes) -> bool:
    """Return whether a request's signature is right; the comparison takes as long for a wrong one."""
    return hmac.compare_digest(sign(secret, fields, body).encode(), fields.get(SIGNATURE, "").encode())
