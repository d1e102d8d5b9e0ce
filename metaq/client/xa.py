"""XA branches over the text protocol (section 5), in the form of PEP 249's two-phase commit extension.

A *branch* is a broker's part of a transaction with other participants, a database for example. Messages sent in it are
invisible until it is committed, and then all of them are visible.
"""

import contextlib
import enum
import itertools
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Self

from metaq.client import checks
from metaq.client.connecting.access import OPEN, Access, Tls
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.connecting.identity import own_address
from metaq.client.text.textclient import TextClient
from metaq.client.transactions.branchplaces import Brokers, Named
from metaq.client.transactions.xaerrors import OutcomeUnknown, XaFailed
from metaq.errors import BadRequest, ClientError, ConnectionFailed, Refused, RequestTimeout
from metaq.protocol.text.codec import write_line, write_put
from metaq.protocol.text.commands import BROKER_CHOOSES, NO_OPAQUE
from metaq.protocol.text.messages import join_attribute
from metaq.protocol.text.replies import OK, Reply
from metaq.tx.branches import XaCode
from metaq.tx.xid import Xid, parse_key

__all__ = ["OutcomeUnknown", "Resolved", "XaCode", "XaFailed", "XaSession", "Xid", "connect", "default_qualifier", "resolve"]

logger = logging.getLogger(__name__)

DEFAULT_BRANCH_TIMEOUT_S: Final = 60
DEFAULT_TIMEOUT_S: Final = 10.0
_NO_KEY: Final = "null"
_XA_EXCEPTION: Final = re.compile(r"XAException:code=(-?\d+),msg=(.*)", re.DOTALL)
_NOT_IN_A_QUALIFIER: Final = re.compile(r"[^!-9;-~]")
_sessions: Final = itertools.count(1)


class Resolved(NamedTuple):
    """The result of ``resolve``."""

    committed: int
    rolled_back: int
    undecided: list[Xid]
    """The branches that were left as they are, because their outcome is not known yet."""
    conflicts: list[Xid]
    """The branches that an operator decided differently from the program, or in part; examine them, then ``forget`` them."""
    unreachable: dict[str, ClientError]
    """The brokers that could not be asked, by address; their branches wait for the next call."""


class _Vote(enum.Enum):
    OPEN = enum.auto()
    PREPARED = enum.auto()
    READ_ONLY = enum.auto()
    """The branch had no messages, so it ended with the vote."""


@dataclass
class _Branch:
    """The branch that a session is in."""

    xid: Xid
    address: str
    vote: _Vote = _Vote.OPEN
    doubt: ClientError | None = None
    """The error that left it unknown whether a message belongs to the branch, which can then only be rolled back."""


def connect(
    address: str,
    *,
    qualifier: str = "",
    branch_timeout_s: int = DEFAULT_BRANCH_TIMEOUT_S,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    user: str = "",
    password: str = "",
    tls: Tls = False,
) -> "XaSession":
    """Return a session with the brokers at ``address``: ``host:port`` or ``host:port;host2:port``, by default port 8123.

    ``Client.xa_session`` finds brokers by a registry instead. See ``XaSession`` for the other parameters.
    """
    access = Access(user, password, tls)
    brokers = Named(address)
    return XaSession(brokers, qualifier=qualifier, branch_timeout_s=branch_timeout_s, timeout_s=timeout_s, access=access)


def default_qualifier() -> str:
    """Return a name of this program on this host, so that programs do not recover each other's branches."""
    program = os.path.basename(sys.argv[0]) or "python"
    return _NOT_IN_A_QUALIFIER.sub("_", f"{program}-{socket.gethostname()}")


class XaSession:
    """A sender of messages in XA branches, one branch at a time.

    ::

        with metaq.client.xa.connect("127.0.0.1:8123") as session:
            session.tpc_begin(session.xid(1, "order-2003", "metaq"))
            session.send("orders", b"paid 2003")
            session.tpc_prepare()
            session.tpc_commit()

    A session is for one thread at a time: a call while another one runs raises ``ClientError``. All messages of a branch go to
    one broker, which is chosen when the branch begins. A broker gives up a branch that is not prepared within
    ``branch_timeout_s``; a prepared one waits until it is committed or rolled back.

    Errors: ``XaFailed`` when the broker answers with a code of XA, ``OutcomeUnknown`` when it is uncertain whether a step was
    carried out, and ``Refused`` when a message was not taken; the branch continues without it.
    """

    def __init__(
        self,
        brokers: Brokers,
        *,
        qualifier: str = "",
        branch_timeout_s: int = DEFAULT_BRANCH_TIMEOUT_S,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        access: Access = OPEN,
    ) -> None:
        """Make a session, which opens connections only when they are needed.

        Args:
            brokers: the brokers that may have branches.
            qualifier: the name of the branches that ``tpc_recover`` lists. Keep it after a restart, and use another one for
                each program that recovers on its own. Printable ASCII without blanks and colons, and not a number. By default
                the names of program and host.
            branch_timeout_s: the most seconds from begin to prepare; the broker may allow less. 0 means no limit.
            timeout_s: the time limit for each connection and each answer.
            access: user and TLS.
        """
        checks.number("branch_timeout_s", branch_timeout_s)
        checks.seconds("timeout_s", timeout_s)
        checks.text("qualifier", qualifier)
        if _NOT_IN_A_QUALIFIER.search(qualifier) or qualifier.isdecimal():
            raise BadRequest(
                f"qualifier {qualifier!r} is not made of printable ASCII without blanks and colons, or is a number"
            )
        self.qualifier = qualifier or default_qualifier()
        self.branch_timeout_s = branch_timeout_s
        self.timeout_s = timeout_s
        self.unreachable: dict[str, ClientError] = {}
        """The brokers that the last ``tpc_recover`` could not ask, by address."""
        self._access = access
        self._brokers = brokers
        self._clients: dict[str, TextClient] = {}
        self._places: dict[Xid, str] = {}  # of prepared branches; other brokers would answer that they do not know them
        self._closed = False
        self.renew()
        renewed_in_children(self)

    def renew(self) -> None:
        """Become another session, in no branch, in a child of a fork: an open branch belongs to the parent."""
        self._id = f"{own_address()}-{os.getpid()}-{time.time_ns() // 1_000_000}-{next(_sessions)}"
        self._branch: _Branch | None = None
        self._in_use = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Roll back a branch that is not prepared, and close the connections. A prepared one stays for ``tpc_recover``."""
        with self._alone():
            if self._branch is not None and self._branch.vote is _Vote.OPEN and not self._closed:
                try:
                    self._roll_back(self._take_branch())
                except ClientError as error:
                    logger.warning("branch not rolled back, it ends by its timeout reason=%s", error)
            self._closed = True
            for client in self._clients.values():
                client.close()

    @property
    def branch(self) -> Xid | None:
        """The branch that the session is in; ``None`` outside of a branch."""
        return None if self._branch is None else self._branch.xid

    # -- PEP 249 ------------------------------------------------------------------------------------------------------

    def xid(self, format_id: int, gtrid: str | bytes, bqual: str | bytes) -> Xid:
        """Return a branch id of the global transaction's id and this part's id, each at most 64 bytes (text as UTF-8)."""
        return _as_xid(str(Xid(format_id, _bytes(gtrid), _bytes(bqual), self.qualifier)))

    def tpc_begin(self, xid: Xid) -> None:
        """Open a branch on one broker; ``ClientError`` when the session is already in one."""
        with self._alone():
            if self._branch is not None:
                raise ClientError(f"this session is in the branch {self._branch.xid}; commit or roll it back first")
            if xid.qualifier != self.qualifier:
                raise BadRequest(f"{xid} has not this session's qualifier {self.qualifier}: tpc_recover would not find it")
            branch = _Branch(xid, self._brokers.choose())
            self._step(branch.address, xid, "BEGIN", timeout=True)
            self._branch = branch

    def send(self, topic: str, body: bytes, *, tag: str | None = None, partition: int = BROKER_CHOOSES) -> int:
        """Send a message in the branch, and return its id, which readers get, too. It becomes visible when the branch commits.

        Without ``partition``, messages go to the topic's partitions on the branch's broker in turn.
        """
        with self._alone():
            branch = self._current()
            if branch.vote is not _Vote.OPEN:
                raise ClientError(f"the branch {branch.xid} is prepared; no message can join it")
            checks.topic(topic)
            checks.message(body, tag, {})
            client = self._client(branch.address)
            if partition == BROKER_CHOOSES:
                partition = self._brokers.partition(topic, branch.address, client)
            flag, data = join_attribute(tag, body)
            key = str(branch.xid)
            try:
                reply = client.ask(lambda opaque: write_put(topic, partition, flag, data, opaque, transaction=key))
            except (ConnectionFailed, RequestTimeout) as error:
                branch.doubt = error
                raise
            if reply.code != OK:
                raise _failure(reply, branch.xid)
            return _message_id(reply)

    def tpc_prepare(self) -> None:
        """End the branch, and have the broker promise that it can be committed; from now on the branch survives a crash.

        ``XaFailed`` when the broker refuses. After ``OutcomeUnknown``, roll back.
        """
        with self._alone():
            branch = self._committable()
            if branch.vote is not _Vote.OPEN:
                raise ClientError(f"the branch {branch.xid} is prepared already")
            advice = "tpc_rollback() ends it in either case"
            reply = self._step(branch.address, branch.xid, "PREPARE", advice=advice, first="END")
            if reply.body == b"%d" % XaCode.RDONLY:
                branch.vote = _Vote.READ_ONLY
            else:
                branch.vote = _Vote.PREPARED
                self._places[branch.xid] = branch.address

    def tpc_commit(self, xid: Xid | None = None) -> None:
        """Commit the session's branch, in one phase if it is not prepared, or a branch that ``tpc_recover`` has listed.

        After ``OutcomeUnknown`` for a prepared branch, ``tpc_recover`` lists the branch as long as it is not committed. The
        outcome of a one-phase commit cannot be queried afterwards.
        """
        with self._alone():
            if xid is not None:
                self._check_outside(xid)
                self._commit_prepared(xid, self._place(xid))
                return
            branch = self._committable()
            self._take_branch()
            if branch.vote is _Vote.PREPARED:
                self._commit_prepared(branch.xid, branch.address)
            elif branch.vote is _Vote.OPEN:
                advice = "nothing but its messages can tell; prepare branches where that matters"
                self._step(branch.address, branch.xid, "COMMIT_ONE_PHASE", advice=advice)

    def tpc_rollback(self, xid: Xid | None = None) -> None:
        """Roll back the session's branch, or a branch that ``tpc_recover`` has listed."""
        with self._alone():
            if xid is not None:
                self._check_outside(xid)
                self._step(self._place(xid), xid, "ROLLBACK", advice="tpc_recover() lists it if it is still there")
                self._places.pop(xid, None)
                return
            self._current()
            self._roll_back(self._take_branch())

    def tpc_recover(self) -> list[Xid]:
        """Return the branches of this qualifier that are prepared or that an operator has decided, on all reachable brokers.

        Afterwards ``unreachable`` has the other brokers. When no broker at all answers, it raises the error of one.
        """
        with self._alone():
            self.unreachable = {}
            found: dict[Xid, str] = {}
            addresses = self._brokers.everyone()
            for address in addresses:
                try:
                    reply = self._asked(address, None, "RECOVER")
                except (ConnectionFailed, RequestTimeout) as error:
                    logger.warning("broker not asked for its branches address=%s reason=%s", address, error)
                    self.unreachable[address] = error
                else:
                    found.update((_listed(line, address), address) for line in reply.body.decode().split())
            if addresses and len(self.unreachable) == len(addresses):
                raise next(iter(self.unreachable.values()))
            kept = {xid: address for xid, address in self._places.items() if address in self.unreachable}
            self._places = kept | found
            return list(found)

    def forget(self, xid: Xid) -> None:
        """Have a broker forget a branch that an operator has decided."""
        with self._alone():
            self._step(self._place(xid), xid, "FORGET", advice="tpc_recover() lists it if it is still there")
            self._places.pop(xid, None)

    def leave(self) -> None:
        """Leave a prepared branch undecided: it stays in the broker, and ``tpc_recover`` lists it."""
        with self._alone():
            branch = self._current()
            if branch.vote is _Vote.OPEN:
                raise ClientError(f"the branch {branch.xid} is not prepared, so it would not last; roll it back")
            self._take_branch()

    # -- the branch ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise ClientError("another call of this session is under way; a session belongs to one thread at a time")
        try:
            yield
        finally:
            self._in_use.release()

    def _current(self) -> _Branch:
        if self._branch is None:
            raise ClientError("this session is in no branch; call tpc_begin first")
        return self._branch

    def _committable(self) -> _Branch:
        branch = self._current()
        if branch.doubt is not None:
            raise ClientError(f"a message of {branch.xid} may be missing ({branch.doubt}); call tpc_rollback")
        return branch

    def _take_branch(self) -> _Branch:
        branch = self._current()
        self._branch = None
        return branch

    def _check_outside(self, xid: Xid) -> None:
        if self._branch is not None:
            raise ClientError(f"this session is in the branch {self._branch.xid}; end it before {xid} is decided")

    def _commit_prepared(self, xid: Xid, address: str) -> None:
        advice = "as long as it is not committed, tpc_recover() lists it, and it can be committed again"
        self._step(address, xid, "COMMIT_TWO_PHASE", advice=advice)
        self._places.pop(xid, None)

    def _roll_back(self, branch: _Branch) -> None:
        if branch.vote is _Vote.READ_ONLY:
            return
        advice = "one that is not prepared ends by its timeout; tpc_recover() lists a prepared one"
        try:
            self._step(branch.address, branch.xid, "ROLLBACK", advice=advice)
        except XaFailed as error:
            if error.code != XaCode.NOTA:  # NOTA: it has timed out, or the broker refused to prepare it
                raise
        self._places.pop(branch.xid, None)

    def _place(self, xid: Xid) -> str:
        """Return the broker's address of a branch that the session is not in; ``ClientError`` when it is not known."""
        addresses = self._brokers.everyone()
        place = self._places.get(xid) or (addresses[0] if len(addresses) == 1 else None)
        if place is None:
            raise ClientError(f"no broker is known to have {xid}; call tpc_recover first")
        return place

    # -- the wire -----------------------------------------------------------------------------------------------------

    def _client(self, address: str) -> TextClient:
        if self._closed:
            raise ClientError("this session was closed")
        if address not in self._clients:
            host, _, port = address.rpartition(":")
            access = self._access
            self._clients[address] = TextClient(
                host,
                int(port),
                timeout_s=self.timeout_s,
                user=access.user,
                password=access.password,
                tls=access.tls or False,
            )
        return self._clients[address]

    def _step(
        self, address: str, xid: Xid, kind: str, *, advice: str = "roll it back", first: str = "", timeout: bool = False
    ) -> Reply:
        """Do one step of a branch; ``OutcomeUnknown`` with ``advice`` when no answer comes, or RMFAIL."""
        try:
            return self._asked(address, xid, kind, first=first, timeout=timeout)
        except (ConnectionFailed, RequestTimeout) as error:
            raise OutcomeUnknown(xid, kind, advice, error) from error
        except XaFailed as error:
            if error.code != XaCode.RMFAIL:
                raise
            # RMFAIL: not synced to disk yet, or the previous step is not finished
            raise OutcomeUnknown(xid, kind, advice, error) from error

    def _asked(self, address: str, xid: Xid | None, kind: str, *, first: str = "", timeout: bool = False) -> Reply:
        head = ("transaction", _NO_KEY if xid is None else str(xid), self._id)
        limit = (self.branch_timeout_s,) if timeout and self.branch_timeout_s else ()

        def write(opaque: int) -> bytes:
            # the first command has no opaque, so that an answer to it is not taken for that to a request in flight
            before = write_line(*head, first, self.qualifier, NO_OPAQUE) if first else b""
            return before + write_line(*head, kind, *limit, self.qualifier, opaque)

        reply = self._client(address).ask(write)
        if reply.code != OK:
            raise _failure(reply, xid)
        return reply


def resolve(session: XaSession, committed: Callable[[Xid], bool | None]) -> Resolved:
    """Finish the branches that were left prepared: commit those whose transaction was committed, roll back the others.

    Args:
        session: a session that is in no branch.
        committed: a function that returns whether the transaction of a branch was committed elsewhere, for example by a row
            that it wrote into the database; ``None`` when that is not known yet. It must not return ``False`` for a
            transaction that may still be committed.

    Branches that cannot be finished now (no answer, undecided) are left for the next call.
    """
    counts = {"COMMIT": 0, "ROLLBACK": 0}
    undecided: list[Xid] = []
    conflicts: list[Xid] = []
    found = session.tpc_recover()
    unreachable = dict(session.unreachable)
    for xid in found:
        outcome = committed(xid)
        if outcome is None:
            undecided.append(xid)
            continue
        try:
            (session.tpc_commit if outcome else session.tpc_rollback)(xid)
        except OutcomeUnknown as error:
            logger.warning("branch not resolved xid=%s reason=%s", xid, error)
            undecided.append(xid)
        except XaFailed as error:
            if error.code == (XaCode.HEURCOM if outcome else XaCode.HEURRB):
                session.forget(xid)  # an operator decided the same
            elif error.code != XaCode.NOTA:  # NOTA: it was resolved elsewhere meanwhile
                logger.error("branch resolved otherwise xid=%s committed=%s reason=%s", xid, outcome, error)
                conflicts.append(xid)
        else:
            counts["COMMIT" if outcome else "ROLLBACK"] += 1
    return Resolved(counts["COMMIT"], counts["ROLLBACK"], undecided, conflicts, unreachable)


def _bytes(part: str | bytes) -> bytes:
    return part.encode() if isinstance(part, str) else part


def _failure(reply: Reply, xid: Xid | None) -> XaFailed | Refused:
    text = reply.body.decode(errors="replace")
    match = _XA_EXCEPTION.fullmatch(text)
    return Refused(reply.code, text) if match is None else XaFailed(int(match[1]), match[2], xid)


def _message_id(reply: Reply) -> int:
    try:
        return int(reply.body.split()[0])
    except (ValueError, IndexError) as error:
        raise ClientError(f"the broker answered {reply.body[:80]!r} to a put where an id is due") from error


def _as_xid(text: str) -> Xid:
    xid = parse_key(text)
    if not isinstance(xid, Xid):
        raise BadRequest(f"{text[:80]!r} is the key of a local transaction")
    return xid


def _listed(text: str, address: str) -> Xid:
    try:
        return _as_xid(text)
    except BadRequest as error:
        raise ClientError(f"the broker {address} listed {text[:80]!r}, which is no branch: {error}") from error
