"""A session of XA branches, in the form of PEP 249's two-phase commit extension."""

import contextlib
import enum
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from metaq.client import checks
from metaq.client.connecting.access import OPEN, Access
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.transactions.branchplaces import BranchBrokers
from metaq.client.transactions.xacommands import XaCommands, as_xid
from metaq.client.transactions.xaerrors import OutcomeUnknown, XaFailed
from metaq.errors import BadRequest, ClientError, ConnectionFailed, RequestTimeout
from metaq.protocol.text.commands import BROKER_CHOOSES
from metaq.tx.xacodes import XaCode
from metaq.tx.xid import Xid

logger = logging.getLogger(__name__)

DEFAULT_BRANCH_TIMEOUT_S: Final = 60
DEFAULT_TIMEOUT_S: Final = 10.0
_NOT_IN_A_QUALIFIER: Final = re.compile(r"[^!-9;-~]")


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
        brokers: BranchBrokers,
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
        self._brokers = brokers
        self._commands = XaCommands(self.qualifier, timeout_s, access)
        self._places: dict[Xid, str] = {}
        """Of prepared branches; other brokers would answer that they do not know them."""
        self._begun: dict[Xid, str] = {}
        """The places of branches that may have begun, as no answer came; ``tpc_recover`` does not list them."""
        self._renew()
        renewed_in_children(self)

    def _renew(self) -> None:
        """Become another session, in no branch, in a child of a fork: an open branch belongs to the parent."""
        self._commands.renew()
        self._branch: _Branch | None = None
        self._in_use = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Roll back a branch that is not prepared, and close the connections. A prepared one stays for ``tpc_recover``.

        Raises:
            ClientError: another thread uses the session.
        """
        with self._alone():
            if self._branch is not None and self._branch.vote is _Vote.OPEN and not self._commands.closed:
                try:
                    self._roll_back(self._take_branch())
                except ClientError as error:
                    logger.warning("branch not rolled back, it ends by its timeout reason=%s", error)
            self._commands.close()

    @property
    def branch(self) -> Xid | None:
        """The branch that the session is in; ``None`` outside of a branch."""
        return None if self._branch is None else self._branch.xid

    # -- PEP 249 ------------------------------------------------------------------------------------------------------

    def xid(self, format_id: int, gtrid: str | bytes, bqual: str | bytes) -> Xid:
        """Return a branch id of the global transaction's id and this part's id, each at most 64 bytes (text as UTF-8).

        Args:
            format_id: the number of the ids' format.
            gtrid: the id of the global transaction.
            bqual: the id of this part of it.

        Raises:
            BadRequest: it is no valid id.
        """
        return as_xid(str(Xid(format_id, _bytes(gtrid), _bytes(bqual), self.qualifier)))

    def tpc_begin(self, xid: Xid) -> None:
        """Open a branch on one broker.

        Args:
            xid: the branch's id, as ``xid`` makes it.

        Raises:
            BadRequest: the id has another qualifier.
            XaFailed: the broker answered with a code of XA.
            OutcomeUnknown: it is uncertain whether the step was carried out; the text says what can be done.
            ClientError: the session is not in the state for it, or another thread uses it.
        """
        with self._alone():
            if self._branch is not None:
                raise ClientError(f"this session is in the branch {self._branch.xid}; commit or roll it back first")
            if xid.qualifier != self.qualifier:
                raise BadRequest(
                    f"{xid} does not have this session's qualifier {self.qualifier}: tpc_recover would not find it"
                )
            branch = _Branch(xid, self._brokers.choose())
            advice = "tpc_rollback(xid) ends it, or answers NOTA when it has not begun"
            try:
                self._commands.step(branch.address, xid, "BEGIN", advice=advice, limit_s=self.branch_timeout_s)
            except OutcomeUnknown:
                self._begun[xid] = branch.address
                raise
            self._branch = branch

    def send(self, topic: str, body: bytes, *, tag: str | None = None, partition: int = BROKER_CHOOSES) -> int:
        """Send a message in the branch, and return its id, which readers get, too. It becomes visible when the branch commits.

        Args:
            topic: the topic.
            body: the body.
            tag: the tag by which consumers can filter.
            partition: the partition; by default those on the branch's broker in turn.

        Raises:
            Refused: the message was not taken; the branch continues without it.
            ConnectionFailed: the connection broke; the branch can only be rolled back.
            RequestTimeout: no answer in time; the branch can only be rolled back.
            BadRequest: an argument is invalid.
            ClientError: the session is not in the state for it, or another thread uses it.
        """
        with self._alone():
            branch = self._current()
            if branch.vote is not _Vote.OPEN:
                raise ClientError(f"the branch {branch.xid} is prepared; no message can join it")
            checks.topic(topic)
            checks.message(body, tag, {})
            if partition == BROKER_CHOOSES:
                partition = self._brokers.partition(topic, branch.address, self._commands.client(branch.address))
            try:
                return self._commands.put(branch.address, branch.xid, topic, partition, body, tag)
            except (ConnectionFailed, RequestTimeout) as error:
                branch.doubt = error
                raise

    def tpc_prepare(self) -> None:
        """End the branch, and have the broker promise that it can be committed; from now on the branch survives a crash.

        Raises:
            XaFailed: the broker answered with a code of XA.
            OutcomeUnknown: it is uncertain whether it is prepared; roll it back.
            ClientError: the session is not in the state for it, or another thread uses it.
        """
        with self._alone():
            branch = self._committable()
            if branch.vote is not _Vote.OPEN:
                raise ClientError(f"the branch {branch.xid} is already prepared")
            advice = "tpc_rollback() ends it in either case"
            reply = self._commands.step(branch.address, branch.xid, "PREPARE", advice=advice, first="END")
            if reply.body == b"%d" % XaCode.RDONLY:
                branch.vote = _Vote.READ_ONLY
            else:
                branch.vote = _Vote.PREPARED
                self._places[branch.xid] = branch.address

    def tpc_commit(self, xid: Xid | None = None) -> None:
        """Commit the session's branch, in one phase if it is not prepared, or a branch that ``tpc_recover`` has listed.

        After ``OutcomeUnknown`` for a prepared branch, ``tpc_recover`` lists the branch as long as it is not committed. The
        outcome of a one-phase commit cannot be queried afterwards.

        Args:
            xid: a branch that ``tpc_recover`` has listed; by default the session's.

        Raises:
            XaFailed: the broker answered with a code of XA.
            OutcomeUnknown: it is uncertain whether the step was carried out; the text says what can be done.
            ClientError: the session is not in the state for it, or another thread uses it.
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
                advice = "only its messages show it; prepare branches if that matters"
                self._commands.step(branch.address, branch.xid, "COMMIT_ONE_PHASE", advice=advice)

    def tpc_rollback(self, xid: Xid | None = None) -> None:
        """Roll back the session's branch, one that ``tpc_recover`` has listed, or one whose ``tpc_begin`` got no answer.

        Args:
            xid: a branch that the session is not in; by default the session's.

        Raises:
            XaFailed: the broker answered with a code of XA.
            OutcomeUnknown: it is uncertain whether the step was carried out; the text says what can be done.
            ClientError: the session is not in the state for it, or another thread uses it.
        """
        with self._alone():
            if xid is not None:
                self._check_outside(xid)
                if xid in self._begun and xid not in self._places:
                    self._roll_back_begun(xid)
                    return
                self._commands.step(self._place(xid), xid, "ROLLBACK", advice="tpc_recover() lists it if it is still there")
                self._places.pop(xid, None)
                return
            self._current()
            self._roll_back(self._take_branch())

    def tpc_recover(self) -> list[Xid]:
        """Return the branches of this qualifier that are prepared or that an operator has decided, on all reachable brokers.

        Afterwards ``unreachable`` has the other brokers.

        Raises:
            ConnectionFailed: no broker at all can be reached.
            RequestTimeout: no broker at all answers in time.
            XaFailed: no broker at all can say it for now.
            ClientError: another thread uses the session.
        """
        with self._alone():
            self.unreachable = {}
            found: dict[Xid, str] = {}
            addresses = self._brokers.everyone()
            for address in addresses:
                try:
                    found.update(dict.fromkeys(self._commands.recover(address), address))
                except (ConnectionFailed, RequestTimeout, XaFailed) as error:  # XaFailed: it cannot answer for now
                    logger.warning("broker not asked for its branches address=%s reason=%s", address, error)
                    self.unreachable[address] = error
            if addresses and len(self.unreachable) == len(addresses):
                raise next(iter(self.unreachable.values()))
            kept = {xid: address for xid, address in self._places.items() if address in self.unreachable}
            self._places = kept | found
            return list(found)

    def forget(self, xid: Xid) -> None:
        """Have a broker forget a branch that an operator has decided.

        Args:
            xid: the branch's id.

        Raises:
            XaFailed: the broker answered with a code of XA.
            OutcomeUnknown: it is uncertain whether the step was carried out; the text says what can be done.
            ClientError: the session is not in the state for it, or another thread uses it.
        """
        with self._alone():
            self._commands.step(self._place(xid), xid, "FORGET", advice="tpc_recover() lists it if it is still there")
            self._places.pop(xid, None)

    def leave(self) -> None:
        """Leave a prepared branch undecided: it stays in the broker, and ``tpc_recover`` lists it.

        Raises:
            ClientError: the session is not in the state for it, or another thread uses it.
        """
        with self._alone():
            branch = self._current()
            if branch.vote is _Vote.OPEN:
                raise ClientError(f"the branch {branch.xid} is not prepared, so it cannot be kept; roll it back")
            self._take_branch()

    # -- the branch ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise ClientError("another call of this session is in progress; only one thread at a time may use a session")
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
        self._commands.step(address, xid, "COMMIT_TWO_PHASE", advice=advice)
        self._places.pop(xid, None)

    def _roll_back(self, branch: _Branch) -> None:
        if branch.vote is _Vote.READ_ONLY:
            return
        advice = "one that is not prepared ends by its timeout; tpc_recover() lists a prepared one"
        try:
            self._commands.step(branch.address, branch.xid, "ROLLBACK", advice=advice)
        except XaFailed as error:
            if error.code != XaCode.NOTA:  # NOTA: it has timed out, or the broker refused to prepare it
                raise
        self._places.pop(branch.xid, None)

    def _roll_back_begun(self, xid: Xid) -> None:
        advice = "tpc_rollback(xid) can be called again, and answers NOTA when the branch is over"
        try:
            self._commands.step(self._begun[xid], xid, "ROLLBACK", advice=advice)
        except XaFailed as error:
            if error.code == XaCode.NOTA:
                del self._begun[xid]
            raise
        del self._begun[xid]

    def _place(self, xid: Xid) -> str:
        """Return the broker's address of a branch that the session is not in; ``ClientError`` when it is not known."""
        place = self._places.get(xid)
        if place is None:  # only then, as a registry that is away must not hinder the end of a branch
            addresses = self._brokers.everyone()
            if len(addresses) != 1:
                raise ClientError(f"no broker is known to have {xid}; call tpc_recover first")
            place = addresses[0]
        return place


def _bytes(part: str | bytes) -> bytes:
    return part.encode() if isinstance(part, str) else part
