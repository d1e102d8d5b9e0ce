"""Commands that are answered from the store, at once or from a greenlet that waits for the disk."""

from metaq.errors import MetaqError
from metaq.protocol.text.replies import write_result
from metaq.server.text.session import TextSession
from metaq.server.wire.reads import StoreRead
from metaq.server.wire.session import Buffer


class TextRead(StoreRead):
    """One such command in progress, which is *owed* from the moment that it has to wait."""

    # no __slots__: mypyc allows none in a base of a compiled class, and gets are compiled

    def __init__(self, session: TextSession, opaque: str) -> None:
        self.session: TextSession = session
        self._opaque = opaque
        self._owed = False

    def settle(self, *buffers: Buffer) -> None:
        """Answer, whether the command is owed or still being handled."""
        if self._owed:
            self.session.answer(1, 0, *buffers)
        else:
            self.session.reply(*buffers)

    def fail(self, error: MetaqError) -> None:
        self.settle(write_result(error.status, str(error), self._opaque))

    def defer(self) -> None:
        if not self._owed:
            self._owed = True
            self.session.owed += 1
