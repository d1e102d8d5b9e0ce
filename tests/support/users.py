"""A users file for tests, and clients that sign their requests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from metaq.protocol.remoting.codes import JSON
from metaq.protocol.remoting.signature import Credentials
from tests.support.remoting import TIMEOUT_S, RemotingClient

ADMIN: Final = Credentials("admin", "admin-secret-1")
READER: Final = Credentials("reader", "reader-secret-1")
WRITER: Final = Credentials("writer", "writer-secret-1")
TOPIC: Final = "t"
GROUP: Final = "g"
USERS: Final = f"""\
users:
  {ADMIN.name}: {{secret: {ADMIN.secret}, admin: true}}
  {READER.name}: {{secret: {READER.secret}, topics: {{{TOPIC}: SUB, "%DLQ%*": SUB}}, groups: {{{GROUP}: SUB}}}}
  {WRITER.name}: {{secret: {WRITER.secret}, topics: {{{TOPIC}: PUB|CREATE, "w-*": PUB}}}}
"""


def write_users(path: Path, text: str = USERS) -> Path:
    """The file, as only its owner can read it."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.replace(path)
    return path


class SigningClient(RemotingClient):
    """Signs every request as ``who``; without one, signs nothing."""

    def __init__(self, host: str, port: int, who: Credentials | None, *, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(host, port, timeout_s=timeout_s)
        self.who = who

    def send(
        self,
        code: int,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        oneway: bool = False,
        serialization: int = JSON,
    ) -> int:
        if self.who is not None:
            fields = self.who.signed(fields, body)
        return super().send(code, fields, body, oneway=oneway, serialization=serialization)
