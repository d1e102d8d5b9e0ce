"""Pops that wait, for the disk, for others, or in line for messages; and rejections, which read the messages first."""

from collections.abc import Sequence

from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.poison import Reason
from metaq.engine.leases.popping import PopResult
from metaq.engine.leases.waiting import Waiting
from metaq.errors import MetaqError
from metaq.leases.events import Dead
from metaq.leases.state import ReceiptState
from metaq.protocol.text.commands import Nack
from metaq.protocol.text.replies import NOT_FOUND, NOTHING_TO_POP, write_result
from metaq.server.text.leaseanswers import Leased, SafeAnswer, counted, give_frames, push_others
from metaq.server.text.reads import TextRead
from metaq.server.text.session import TextSession
from metaq.server.wire.pops import PopRead
from metaq.store.files.filecache import Read


class HeldPop(PopRead, TextRead):
    """A pop in progress."""

    def hold(self, place: Waiting) -> None:
        self.session.held = place

    def release(self, place: Waiting) -> None:
        self.session.held = None

    def give(self, result: PopResult) -> None:
        give_frames(self.leasing.leases, self.session, self._opaque, self.wanted, result)

    def give_nothing(self, *, is_full: bool) -> None:
        self.settle(write_result(NOT_FOUND, NOTHING_TO_POP, self._opaque))


class RejectionWait(TextRead):
    """Messages on their way to the dead letters, whose records must be read first."""

    def __init__(self, leasing: Leasing, session: TextSession, command: Nack, found: Sequence[Leased]) -> None:
        super().__init__(session, command.opaque)
        self._leases = leasing.leases
        self._poison = leasing.poison
        self._command = command
        self._found = found

    def read(self, read: Read) -> list[tuple[Leased, bytes | None]]:
        return [(leased, self._leases.message(leased.place, leased.ordinal, read)) for leased in self._found]

    def found(self, records: list[tuple[Leased, bytes | None]]) -> None:
        """Give the messages up; answer when the dead letters are as safe as promised, or why none can be."""
        given_up: list[Leased] = []
        obstacle: MetaqError | None = None
        self._leases.context.store.check_appendable()
        for leased, record in records:
            place, ordinal, pop_ms = leased
            if self._leases.receipt_state(place, ordinal, pop_ms) is not ReceiptState.LEASED:
                continue
            try:
                if record is None:
                    self._leases.record(place, Dead(ordinal))
                else:
                    self._poison.stage(place, ordinal, record, Reason.REJECTED)
            except MetaqError as error:  # this one stays open
                obstacle = error
            else:
                given_up.append(leased)
        if not given_up:
            if obstacle is not None:
                raise obstacle
            self.settle(counted(self._command, 0))
            return
        push_others(self.session, given_up)
        self.defer()
        answer = SafeAnswer(self.session, self._opaque, counted(self._command, len(given_up)))
        self._leases.staged(answer, {place for place, _, _ in given_up})
