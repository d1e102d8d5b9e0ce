"""XA branches for asyncio."""

from types import TracebackType
from typing import Self

from metaq.aio.faces import OneByOne, Threads, alone
from metaq.client.xa import XaSession as BlockingSession
from metaq.client.xa import Xid
from metaq.errors import ClientError


class XaSession:
    """See ``metaq.XaSession``; made by ``Client.xa_session``. A call waits until the previous one has ended."""

    def __init__(self, session: BlockingSession, threads: Threads) -> None:
        self._blocking = session
        self._calls = OneByOne(threads)

    tpc_begin = alone(BlockingSession.tpc_begin)
    send = alone(BlockingSession.send)
    tpc_prepare = alone(BlockingSession.tpc_prepare)
    tpc_commit = alone(BlockingSession.tpc_commit)
    tpc_rollback = alone(BlockingSession.tpc_rollback)
    tpc_recover = alone(BlockingSession.tpc_recover)
    forget = alone(BlockingSession.forget)
    leave = alone(BlockingSession.leave)
    close = alone(BlockingSession.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def xid(self, format_id: int, gtrid: str | bytes, bqual: str | bytes) -> Xid:
        """Return a branch id: see ``metaq.XaSession.xid``."""
        return self._blocking.xid(format_id, gtrid, bqual)

    @property
    def branch(self) -> Xid | None:
        """The branch that the session is in; ``None`` outside of a branch."""
        return self._blocking.branch

    @property
    def qualifier(self) -> str:
        """The qualifier of the branches that ``tpc_recover`` lists."""
        return self._blocking.qualifier

    @property
    def branch_timeout_s(self) -> int:
        """The most seconds from begin to prepare; 0 means no limit."""
        return self._blocking.branch_timeout_s

    @property
    def timeout_s(self) -> float:
        """The time limit for each connection and each answer, in seconds."""
        return self._blocking.timeout_s

    @property
    def unreachable(self) -> dict[str, ClientError]:
        """The brokers that the last ``tpc_recover`` could not ask, by address."""
        return self._blocking.unreachable
