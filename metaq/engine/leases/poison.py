"""Messages that a group gives up: each goes to the dead letters exactly once.

The event and the copy are one group of records: recovery keeps both or neither. Until they are in the log, nobody gets the
message; if they do not get there, it waits to be given again.
"""

import enum
import logging
from functools import partial

from metaq.engine.context import Context
from metaq.engine.deadletters import dead_letter, report_dead_letter
from metaq.engine.leases.leases import Leases
from metaq.engine.leases.moving import Moves
from metaq.engine.tables.groups import Group
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, again, new_record
from metaq.errors import MessageIllegal, MetaqError, StoreError
from metaq.leases.redelivered import MOST_TIMES
from metaq.message import GroupPartition
from metaq.protocol import properties
from metaq.protocol.ids import offset_id_of
from metaq.protocol.record import Record, decode_record
from metaq.store.newrecord import NewRecord

logger = logging.getLogger(__name__)


class Reason(enum.StrEnum):
    """Why a message was given up: the property ``METAQ_DEAD`` of the copy."""

    TIMES = "times"
    """It was delivered as often as its group allows."""
    REJECTED = "rejected"
    """Its consumer said so."""
    AGED_OUT = "aged out"
    """Its segment is deleted."""


class Poison:
    """Gives messages up."""

    def __init__(self, context: Context, leases: Leases, moves: Moves, turns: Turns) -> None:
        self._context = context
        self._moves = moves
        self._leases = leases
        self._turns = turns
        self._complaint = ""

    def give_up(self, place: GroupPartition, ordinal: int, record: bytes, reason: Reason) -> bool:
        """Move an open message to the dead letters of its group; return false when that fails now, which is logged."""
        try:
            self.stage(place, ordinal, record, reason)
        except MetaqError as error:
            self._complain(place, ordinal, error)
            return False
        return True

    def stage(self, place: GroupPartition, ordinal: int, record: bytes, reason: Reason) -> None:
        """Stage an open message for the dead letters of its group. Raise ``MetaqError`` when that cannot be: it stays open."""
        state = self._leases.get(place)
        bunch = None if state is None else state.find(ordinal)
        if state is None or bunch is None or state.is_claimed(ordinal):
            return
        self._context.store.check_appendable()
        group = self._context.groups.ensure(place.group)  # it may have been deleted while its messages were out
        draft, copy = self._copy(group, decode_record(record), bunch.times, reason)
        self._moves.stage(place, [ordinal], [copy], partial(self._appended, place, ordinal))
        report_dead_letter(self._context, self._turns, draft)

    def _copy(self, group: Group, message: Record, times: int, reason: Reason) -> tuple[Draft, NewRecord]:
        """Return the dead letter. One whose properties have no room for more has those of the message alone."""
        pairs = properties.parse(message.properties.decode(errors="replace"))
        message_id = offset_id_of(message.store_host, message.log_offset)
        origin = {properties.DEAD_TOPIC: message.topic, properties.DEAD_ID: message_id}
        more = {properties.RETRY_TOPIC: message.topic, properties.ORIGIN_ID: message_id, **pairs, **origin}
        draft = again(message, message.topic, message.partition, more)
        draft.reconsume_times = min(MOST_TIMES, message.reconsume_times + times)
        draft = dead_letter(self._context, group, draft)
        try:
            return draft, new_record(self._context, draft, {properties.DEAD: reason.value})
        except MessageIllegal:
            draft.properties = pairs
            draft = dead_letter(self._context, group, draft)
            return draft, new_record(self._context, draft)

    def _appended(self, place: GroupPartition, ordinal: int, failure: StoreError | None) -> None:
        if failure is not None:
            self._complain(place, ordinal, failure)
            return
        self._complaint = ""

    def _complain(self, place: GroupPartition, ordinal: int, error: MetaqError) -> None:
        """Log once why messages that were delivered too often stay open."""
        if str(error) != self._complaint:
            logger.error(
                "a message cannot be given up group=%s topic=%s partition=%d ordinal=%d reason=%s", *place, ordinal, error
            )
        self._complaint = str(error)
