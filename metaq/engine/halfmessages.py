"""Half messages on their way: parked until their producer decides, staged again as what a decision brings about.

A commit must be able to store what it brings about: so whatever could be wrong with the message is refused when it is sent.
"""

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from metaq.engine.context import Context
from metaq.engine.tables.topics import HALF_OP_TOPIC, HALF_TOPIC
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, delayed, note, ready
from metaq.errors import MetaqError, StoreError, UnknownTopic
from metaq.protocol import properties
from metaq.protocol.record import TAGS, Record
from metaq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_TYPE
from metaq.store.files.filecache import ColdRead, read_cached
from metaq.store.recordgroups import put_together
from metaq.tx.halves import LONGEST_ORIGIN, Fate, Halves

logger = logging.getLogger(__name__)

DECIDED: Final = "d"
"""Tag of an op record."""
LONGEST_ORDINAL: Final = str((1 << 63) - 1)


def is_transactional(pairs: Mapping[str, str]) -> bool:
    """Whether a message is one of a transaction, as its properties say."""
    return pairs.get(properties.TRANSACTION, "").lower() == "true"


def is_half(draft: Draft) -> bool:
    """Whether a message is to wait for a decision: a delayed retry of one that was transactional is not."""
    delayed_retry = draft.reconsume_times > 0 and draft.properties.get(properties.DELAY, "0") != "0"
    return is_transactional(draft.properties) and not delayed_retry


def half_of(draft: Draft, producer_group: str) -> Draft:
    """The same message, parked; ``MessageIllegal`` when it could not be stored once it is committed."""
    pairs = draft.properties
    pairs.setdefault(properties.PRODUCER_GROUP, producer_group)  # who is asked; not every client says so
    kept = {**pairs, properties.REAL_TOPIC: draft.topic, properties.REAL_QUEUE: str(draft.partition)}
    properties.encode(kept, {properties.HALF: LONGEST_ORIGIN})
    delayed(Draft(draft.topic, draft.partition, b"", _committed(kept, LONGEST_ORDINAL), 0, 0, 0, draft.born_host))
    return Draft(
        *(HALF_TOPIC, 0, draft.body, kept, draft.flag, draft.sys_flag & ~TRANSACTION_TYPE),
        *(draft.born_ms, draft.born_host, draft.reconsume_times),
    )


def _committed(pairs: dict[str, str], ordinal: str) -> dict[str, str]:
    """Properties of a half message as consumers get them."""
    own = (properties.TRANSACTION, properties.REAL_TOPIC, properties.REAL_QUEUE)
    return {**{name: value for name, value in pairs.items() if name not in own}, properties.PREPARED_OFFSET: ordinal}


def pairs_of(record: Record) -> dict[str, str]:
    """A record's properties."""
    return properties.parse(record.properties.decode(errors="replace"))


def parked(record: Record, pairs: dict[str, str], topic: str) -> Draft:
    """A half message once more: in the half topic, or in the one of those that were given up."""
    return Draft(
        *(topic, 0, record.body, pairs, record.flag, record.sys_flag),
        *(record.born_ms, record.born_host, record.reconsume_times),
    )


class HalfMessages:
    """The half messages of one broker."""

    def __init__(self, context: Context, turns: Turns, halves: Halves) -> None:
        self.context = context
        self.turns = turns
        self.halves = halves
        self._noted = -1  # the turn at whose end the table follows

    def staged(self) -> None:
        """A half message was staged in this turn: it is undecided from the moment that readers see it."""
        if self._noted != self.turns.number:
            self._noted = self.turns.number
            note(self.turns, lambda _: self._follow())

    def _follow(self) -> None:
        # what has to be read from the disk, or cannot be, is met again by the next check or decision, which says so
        with contextlib.suppress(ColdRead, StoreError):
            self.halves.follow(read_cached)

    def decide(self, ordinal: int, fate: Fate, message: Draft | None = None, own: Mapping[str, str] = properties.NONE) -> None:
        """Stage the decision of a half message that is undecided, together with the ``message`` that it brings about.

        ``own`` are properties of that one which only the broker may set.
        """
        context = self.context
        now_ms = context.store.clock.now_ms()
        op = Draft(HALF_OP_TOPIC, 0, str(ordinal).encode(), {TAGS: DECIDED}, 0, 0, now_ms, context.store_host)
        members = [] if message is None else [ready(context, message, own)]
        put_together(context.store, ready(context, op), members)
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
        """The message that consumers get, delayed when it asks for that; ``UnknownTopic`` when its topic was deleted."""
        name, number = pairs[properties.REAL_TOPIC], int(pairs[properties.REAL_QUEUE])
        topics = self.context.topics
        topic = topics.get(name)
        if topic is None and not any(key.topic == name for key in topics.deleted):
            topic = topics.ensure(name, number + 1)  # a killed broker may forget a topic that holds no message yet
        if topic is None or not topic.all_partitions:
            raise UnknownTopic(f"the topic {name} was deleted: make it again, or the message is given up in the end")
        draft = Draft(
            *(name, number % topic.all_partitions, record.body, _committed(pairs, str(ordinal)), record.flag),  # it may shrink
            *(record.sys_flag | TRANSACTION_COMMIT, record.born_ms, record.born_host, record.reconsume_times),
        )
        return delayed(draft)
