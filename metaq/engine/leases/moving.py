"""Moving open messages elsewhere: to the dead letters, or to the retries of a group that pulls from now on.

The events that close them and their copies are one group of records: recovery keeps all or nothing. Until they are in the log,
nobody gets these messages; if they do not get there, they are as they were.
"""

from collections.abc import Callable, Sequence
from functools import partial

from metaq.engine.context import Context
from metaq.engine.leases.leases import Leases
from metaq.engine.turn import Turns
from metaq.engine.writing import internal, new_record
from metaq.errors import StoreError
from metaq.leases.events import Dead
from metaq.message import LEASES_TOPIC, GroupPartition
from metaq.store.newrecord import NewRecord
from metaq.store.recordgroups import put_record_group

Moved = Callable[[StoreError | None], None]


class Moves:
    """Stages such groups of records."""

    def __init__(self, context: Context, leases: Leases, turns: Turns) -> None:
        self._context = context
        self._leases = leases
        self._turns = turns

    def stage(self, place: GroupPartition, ordinals: Sequence[int], copies: Sequence[NewRecord], moved: Moved) -> None:
        """Stage open messages of a place; ``moved`` receives the result of the append.

        The caller has called ``check_appendable`` of the store. Raise ``MetaqError`` when it cannot be: the messages stay open.
        """
        state = self._leases.get(place)
        assert state is not None, place
        body = self._leases.log.mark(place, [Dead(ordinal) for ordinal in ordinals])
        mark = new_record(self._context, internal(self._context, LEASES_TOPIC, body))
        put_record_group(self._context.store, mark, copies)
        for ordinal in ordinals:
            state.claim(ordinal)
        self._turns.after_append(partial(self._appended, place, ordinals, moved))

    def _appended(self, place: GroupPartition, ordinals: Sequence[int], moved: Moved, failure: StoreError | None) -> None:
        state = self._leases.get(place)
        for ordinal in ordinals:
            was_claimed = state is not None and state.release(ordinal, is_dead=failure is None)
            if was_claimed and failure is None:  # not, if it was reset since: then it is given again
                self._leases.died(place, ordinal)
        moved(failure)
