"""The commands of XA branches on the wire, and the connections of one session (specs: text protocol, section 5)."""

import itertools
import os
import re
import time
from typing import Final

from metaq.address import parse_address
from metaq.client.connecting.access import Access
from metaq.client.connecting.identity import own_address
from metaq.client.text.textclient import TextClient
from metaq.client.transactions.xaerrors import OutcomeUnknown, XaFailed
from metaq.errors import BadRequest, ClientError, ConnectionFailed, Refused, RequestTimeout
from metaq.protocol.text.commands import NO_KEY, NO_OPAQUE
from metaq.protocol.text.messages import join_attribute
from metaq.protocol.text.replies import OK, Reply
from metaq.protocol.text.writing import write_line, write_put
from metaq.tx.xacodes import XaCode
from metaq.tx.xid import Xid, parse_key

_XA_EXCEPTION: Final = re.compile(r"XAException:code=(-?\d+),msg=(.*)", re.DOTALL)
_sessions: Final = itertools.count(1)


class XaCommands:
    """The commands of one session to brokers, each at its address. No branch is kept here."""

    def __init__(self, qualifier: str, timeout_s: float, access: Access) -> None:
        """Open connections only when they are needed; each connection and each answer may take ``timeout_s``.

        ``renew`` must follow.
        """
        self._qualifier = qualifier
        self._timeout_s = timeout_s
        self._access = access
        self._clients: dict[str, TextClient] = {}
        self.closed = False

    def renew(self) -> None:
        """Take the id of a new session."""
        self._id = f"{own_address()}-{os.getpid()}-{time.time_ns() // 1_000_000}-{next(_sessions)}"

    def close(self) -> None:
        """Close the connections."""
        self.closed = True
        for client in self._clients.values():
            client.close()

    def client(self, address: str) -> TextClient:
        """Return the connection to a broker."""
        if self.closed:
            raise ClientError("this session was closed")
        if address not in self._clients:
            access = self._access
            self._clients[address] = TextClient(
                *parse_address(address),
                timeout_s=self._timeout_s,
                user=access.user,
                password=access.password,
                tls=access.tls or False,
            )
        return self._clients[address]

    def put(self, address: str, xid: Xid, topic: str, partition: int, body: bytes, tag: str | None) -> int:
        """Put a message into a branch; return the id of the message."""
        flag, data = join_attribute(tag, body)
        key = str(xid)
        reply = self.client(address)._ask(lambda opaque: write_put(topic, partition, flag, data, opaque, transaction=key))
        if reply.code != OK:
            raise _failure(reply, xid)
        return _message_id(reply)

    def step(self, address: str, xid: Xid, kind: str, *, advice: str, first: str = "", limit_s: int = 0) -> Reply:
        """Do one step of a branch, after the unanswered command ``first``; a branch that begins may take ``limit_s``.

        ``OutcomeUnknown`` with ``advice`` when no answer comes, or RMFAIL.
        """
        try:
            return self._asked(address, xid, kind, first=first, limit_s=limit_s)
        except (ConnectionFailed, RequestTimeout) as error:
            raise OutcomeUnknown(xid, kind, advice, error) from error
        except XaFailed as error:
            if error.code != XaCode.RMFAIL:
                raise
            # RMFAIL: not synced to disk yet, or the previous step is not finished
            raise OutcomeUnknown(xid, kind, advice, error) from error

    def recover(self, address: str) -> list[Xid]:
        """Return the branches of the session's qualifier that are prepared or that an operator has decided."""
        reply = self._asked(address, None, "RECOVER")
        return [_listed(line, address) for line in reply.body.decode().split()]

    def _asked(self, address: str, xid: Xid | None, kind: str, *, first: str = "", limit_s: int = 0) -> Reply:
        head = ("transaction", NO_KEY if xid is None else str(xid), self._id)
        limit = (limit_s,) if limit_s else ()

        def write(opaque: int) -> bytes:
            # the first command has no opaque, so that an answer to it is not taken for that to a request in flight
            before = write_line(*head, first, self._qualifier, NO_OPAQUE) if first else b""
            return before + write_line(*head, kind, *limit, self._qualifier, opaque)

        reply = self.client(address)._ask(write)
        if reply.code != OK:
            raise _failure(reply, xid)
        return reply


def as_xid(text: str) -> Xid:
    """Return the branch id that a key stands for. ``BadRequest`` when it stands for none."""
    xid = parse_key(text)
    if not isinstance(xid, Xid):
        raise BadRequest(f"{text[:80]!r} is the key of a local transaction")
    return xid


def _listed(text: str, address: str) -> Xid:
    try:
        return as_xid(text)
    except BadRequest as error:
        raise ClientError(f"the broker {address} listed {text[:80]!r}, which is not a branch: {error}") from error


def _failure(reply: Reply, xid: Xid | None) -> XaFailed | Refused:
    text = reply.body.decode(errors="replace")
    match = _XA_EXCEPTION.fullmatch(text)
    return Refused(reply.code, text) if match is None else XaFailed(int(match[1]), match[2], xid)


def _message_id(reply: Reply) -> int:
    try:
        return int(reply.body.split()[0])
    except (ValueError, IndexError) as error:
        raise ClientError(f"the broker answered {reply.body[:80]!r} to a put instead of an id") from error
