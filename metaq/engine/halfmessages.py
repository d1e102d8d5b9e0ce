"""Half messages: parked until their producer decides, then staged as the message that the decision brings about.

A commit must be able to store its message. So everything that could be wrong with the message is refused when it is sent.
"""

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from metaq.dedupe.records import First
from metaq.engine.context import Context
from metaq.engine.dedupe.asking import ColdIds
from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.priorities.levels import check_priority, partition_of_copy
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, Placed, again, delayed, internal, new_record, note, stage
from metaq.errors import MessageIllegal, MetaqError, StoreError, UnknownTopic
from metaq.message import HALF_OP_TOPIC, HALF_TOPIC
from metaq.protocol import properties
from metaq.protocol.record import TAGS, Record, decode_record
from metaq.protocol.sysflag import TRANSACTION_COMMIT
from metaq.store.files.filecache import ColdRead, read_cached, read_here
from metaq.store.recordgroups import put_record_group
from metaq.tx.halves import LONGEST_ORIGIN, Fate, Halves, origin_of

logger = logging.getLogger(__name__)

DECIDED: Final = "d"
"""The tag of an op record, which records a decision."""
LONGEST_ORDINAL: Final = str((1 << 63) - 1)


def is_transactional(pairs: Mapping[str, str]) -> bool:
    """Return whether a message belongs to a transaction, according to its properties."""
    return pairs.get(properties.TRANSACTION, "").lower() == "true"


def is_half(draft: Draft) -> bool:
    """Return whether a message has to wait for a decision; a delayed retry of a transactional message has not."""
    delayed_retry = draft.reconsume_times > 0 and draft.properties.get(properties.DELAY, "0") != "0"
    return is_transactional(draft.properties) and not delayed_retry


def _committed(pairs: dict[str, str], ordinal: str) -> dict[str, str]:
    """Return the properties of a half message as consumers get them."""
    own = (properties.TRANSACTION, properties.REAL_TOPIC, properties.REAL_QUEUE)
    return {**{name: value for name, value in pairs.items() if name not in own}, properties.PREPARED_OFFSET: ordinal}


def pairs_of(record: Record) -> dict[str, str]:
    """Return a record's properties."""
    return properties.parse(record.properties.decode(errors="replace"))


class HalfMessages:
    """The half messages of one broker."""

    def __init__(self, context: Context, turns: Turns, halves: Halves, dedupe: Dedupe) -> None:
        self.context = context
        self.turns = turns
        self.halves = halves
        self._dedupe = dedupe
        self._noted = -1  # the turn at whose end the table of halves is brought up to date
        self._unique_keys: dict[int, str | None] = {}
        """The UNIQ_KEYs of the halves that were parked in that turn, by log offset."""

    def park(self, draft: Draft, producer_group: str) -> Placed:
        """Stage a message in the half topic, where it waits for its decision, and return its place there.

        Raises what ``stage`` raises, and ``MessageIllegal`` when the message could not be stored once it is committed, or when
        nobody could be asked about it.
        """
        pairs = draft.properties
        for name in properties.TIMERS:
            if name in pairs and properties.TIMER_OUT not in pairs:
                raise MessageIllegal(f"a transactional message cannot be delayed by the property {name}; use a delay level")
        check_priority(self.context.topics, draft)
        if properties.PRODUCER_GROUP not in pairs:  # whom to check with; not every client sets it
            if not properties.is_value(producer_group):
                raise MessageIllegal(
                    f"a transactional message needs a producer group, without the bytes 01 and 02, not {producer_group[:40]!r}"
                )
            pairs[properties.PRODUCER_GROUP] = producer_group
        kept = {**pairs, properties.REAL_TOPIC: draft.topic, properties.REAL_QUEUE: str(draft.partition)}
        properties.encode(kept, {properties.HALF: LONGEST_ORIGIN})
        delayed(draft.moved(draft.topic, draft.partition, _committed(kept, LONGEST_ORDINAL)))
        placed = stage(self.context, draft.moved(HALF_TOPIC, 0, kept))
        self.staged()
        self._unique_keys[placed.log_offset] = pairs.get(properties.UNIQUE_KEY)
        return placed

    def check_repeat(self, draft: Draft, first: First) -> None:
        """Raise ``MessageIllegal`` when a half message has the id of a half that is undecided, but is of another transaction.

        Nobody could decide it: only the first one is stored. Raises ``ColdIds`` when that must be read from the disk.
        """
        ident, unique_key = draft.properties.get(properties.DEDUPE_ID), draft.properties.get(properties.UNIQUE_KEY)
        place = self.halves.place_of(first.ordinal, first.log_offset)
        if not ident or unique_key is None or place is None:
            return
        if self._unique_key_at(place, draft.topic, ident) != unique_key:
            reason = f"the transaction of the first message with the {properties.DEDUPE_ID} {ident[:40]!r} is undecided"
            raise MessageIllegal(f"{reason}; send this one again once it is decided")

    def _unique_key_at(self, place: int, topic: str, ident: str) -> str | None:
        store, asking = self.context.store, self._dedupe.asking
        if place >= store.log.end:  # staged in this turn: there is nothing to read yet
            return self._unique_keys.get(place)
        read_first = partial(store.log.record_at, place)
        try:
            stored = read_first(read_here if asking.has_read else read_cached)
        except ColdRead:
            raise ColdIds(self._dedupe.keys(topic, ident, store.clock.now_ms()), read_first) from None
        return None if stored is None else pairs_of(decode_record(bytes(stored.buffer))).get(properties.UNIQUE_KEY)

    def staged(self) -> None:
        """Note that a half message was staged in this turn: it is undecided as soon as readers can see it."""
        if self._noted != self.turns.number:
            self._noted = self.turns.number
            self._unique_keys = {}
            note(self.turns, lambda _: self._follow())

    def _follow(self) -> None:
        # a record that must be read from the disk, or cannot be, is met again by the next check or decision, which reports it
        with contextlib.suppress(ColdRead, StoreError):
            self.halves.follow(read_cached)

    def roll_back(self, record: Record, pairs: dict[str, str]) -> None:
        """Stage the rollback of the undecided half message in a record with the properties ``pairs``.

        Raises what ``Dedupe.release`` raises.
        """
        ordinal, log_offset, since_ms = origin_of(record, pairs)
        self._dedupe.release(pairs, log_offset, since_ms, lambda told: self.decide(ordinal, Fate.ROLLED_BACK, told=told))

    def decide(
        self,
        ordinal: int,
        fate: Fate,
        message: Draft | None = None,
        own: Mapping[str, str] = properties.NONE,
        told: Mapping[str, str] = properties.NONE,
    ) -> None:
        """Stage the decision about an undecided half message, together with the ``message`` that it brings about.

        ``own`` are properties of that message that only the broker may set, ``told`` further ones of the decision.
        """
        context = self.context
        op = internal(context, HALF_OP_TOPIC, str(ordinal).encode(), {TAGS: DECIDED, **told})
        members = [] if message is None else [new_record(context, message, own)]
        put_record_group(context.store, new_record(context, op), members)
        self.halves.claim(ordinal)
        note(self.turns, partial(self._decided, ordinal, fate))

    def _decided(self, ordinal: int, fate: Fate, error: MetaqError | None) -> None:
        if error is not None:
            self.halves.release(ordinal)
            logger.error("decision not stored, the message is undecided again ordinal=%d reason=%s", ordinal, error)
            return
        self.halves.decided[fate] += 1
        self._follow()

    def committed(self, record: Record, pairs: dict[str, str], ordinal: int) -> Draft:
        """Return the message that consumers get, parked for its delay level if it has one.

        Raises ``UnknownTopic`` when its topic was deleted.
        """
        name, number = pairs[properties.REAL_TOPIC], int(pairs[properties.REAL_QUEUE])
        topic = self.context.topics.of_parked(name, number)
        if topic is None:
            raise UnknownTopic(f"the topic {name} was deleted: create it again, or the message is finally given up")
        draft = again(record, name, partition_of_copy(topic, pairs, number), _committed(pairs, str(ordinal)))
        draft.sys_flag |= TRANSACTION_COMMIT
        return delayed(draft)
