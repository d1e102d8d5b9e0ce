"""The leases of one group in one partition: what is done, what is leased, and what waits to be given again.

::

      done    ┃ open and done, mixed                        ┃ never given
    ──────────┸─────────────────────────────────────────────┸────────────────▶ ordinals
              base                                          next

A message in [base, next) is *open* until it is acked or given up. It is *leased* while its time has not come, and *waiting*
afterwards. That a lease ends is no event: it is the time. ``base`` is the lowest open ordinal, and the group's offset.

What one pop took is one *bunch*, with a bit for each message that is still open. A message that is given again, or whose time
is changed, gets a bunch of its own. A message is *lined* when it is open but was never given, because another one with its key
is open before it; when that is done, it waits. Times in events are Unix milliseconds. In the state they are milliseconds of the
monotonic clock, so that setting the clock ends no lease; ``shift_ms`` is what to add to get Unix time.
"""

import enum
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, Final

from metaq.leases.bunch import Bunch
from metaq.leases.events import (
    Acked,
    Changed,
    Dead,
    Forgotten,
    LeaseEvent,
    Lined,
    More,
    Passed,
    Popped,
    Repeated,
    Reset,
    Row,
    Whole,
)
from metaq.leases.keylines import KeyLines

SLACK: Final = 1024
"""Entries of ended leases that a heap may hold beside those of open ones before it is made anew."""
ROWS: Final = 128
"""Rows in one event of a whole state: 8 KB, or 45 KB when each of them has a bit for 1,024 messages."""
NEVER: Final = 1 << 62
"""A time that does not come: that of a message on its way to the dead letters."""


class ReceiptState(enum.Enum):
    """The state of the message that a receipt names, as far as it concerns the receipt."""

    LEASED = "leased"
    OVER = "over"
    """The lease has ended, and the message has not been given again."""
    AGAIN = "given again"
    DONE = "done"
    UNKNOWN = "never given"


class PartitionLeases:
    """The state of one group in one partition. ``apply`` is the only way to change it."""

    def __init__(self, base: int) -> None:
        """Begin with everything before ``base`` done, and nothing open."""
        self.last_pop_ms = 0
        """The latest ``pop_ms``: that of the next delivery must be greater."""
        self.version = 0
        """A number that rises with every event."""
        self._clear(base)

    def _clear(self, base: int) -> None:
        """Begin again with everything before ``base`` done, and nothing open."""
        self.next = base
        """The first ordinal that was never given."""
        self.open = 0
        """The number of open messages."""
        self.delayed = 0
        """Those of them that were given back with a delay which goes on, as of the last ``settle``."""
        self._wide: list[Bunch] = []  # of several messages, disjoint, sorted
        self._firsts: list[int] = []  # the first ordinals of these
        self._single: dict[int, Bunch] = {}
        self._single_heap: list[int] = []
        self._due: list[Bunch] = []  # a heap of leased ones, beside some of which nothing is open
        self._waiting: set[int] = set()
        self.keys: KeyLines | None = None
        """The keys of all open messages, while they are given in the order of each key."""
        self._lined: set[int] = set()
        self._claimed: set[int] = set()
        self._waiting_heap: list[int] = []

    # -- asking -------------------------------------------------------------------------------------------------------

    @property
    def base(self) -> int:
        """The lowest open ordinal; ``next`` when nothing is open."""
        heap = self._single_heap
        while heap and heap[0] not in self._single:
            heappop(heap)
        lowest = heap[0] if heap else self.next
        if self._wide:
            first = self._wide[0]
            lowest = min(lowest, first.first + (first.open & -first.open).bit_length() - 1)
        return lowest

    @property
    def waiting(self) -> int:
        """The number of open messages whose leases have ended, as of the last ``settle``."""
        return len(self._waiting)

    @property
    def leased(self) -> int:
        """The number of open messages whose leases go on, as of the last ``settle``."""
        return self.open - len(self._waiting) - len(self._lined)

    @property
    def lined(self) -> int:
        """The number of open messages that were never given, because others with their keys are before them."""
        return len(self._lined)

    @property
    def next_due_ms(self) -> int | None:
        """When the next lease ends, on the monotonic clock; ``None`` when none is going on."""
        heap = self._due
        while heap and not heap[0].open:
            heappop(heap)
        return heap[0].due_ms if heap and heap[0].due_ms < NEVER else None

    def settle(self, now_ms: int) -> None:
        """Let the messages wait whose leases have ended; ``now_ms`` is monotonic."""
        heap = self._due
        while heap and heap[0].due_ms <= now_ms:
            bunch = heappop(heap)
            if bunch.open:
                self._end_delay(bunch)
                for ordinal in bunch.ordinals():
                    if ordinal not in self._claimed:
                        self._wait(ordinal)

    def first_waiting(self, most: int) -> list[int]:
        """Return the lowest waiting ordinals, in order, at most so many."""
        heap = self._waiting_heap
        found: list[int] = []
        while heap and len(found) < most:
            ordinal = heappop(heap)
            if ordinal in self._waiting and (not found or found[-1] != ordinal):
                found.append(ordinal)
        for ordinal in found:
            heappush(heap, ordinal)
        return found

    def find(self, ordinal: int) -> Bunch | None:
        """Return the bunch in which a message is open."""
        single = self._single.get(ordinal)
        if single is not None:
            return single
        index = bisect_right(self._firsts, ordinal) - 1
        if index < 0:
            return None
        bunch = self._wide[index]
        return bunch if bunch.open >> (ordinal - bunch.first) & 1 else None

    def receipt_state(self, ordinal: int, pop_ms: int) -> ReceiptState:
        """Return what has become of the delivery that a receipt names, as of the last ``settle``."""
        if not 0 <= ordinal < self.next:
            return ReceiptState.UNKNOWN
        bunch = self.find(ordinal)
        if bunch is None or ordinal in self._claimed:
            return ReceiptState.DONE
        if bunch.pop_ms != pop_ms:
            return ReceiptState.AGAIN
        return ReceiptState.OVER if ordinal in self._waiting else ReceiptState.LEASED

    def is_out(self, ordinal: int, pop_ms: int) -> bool:
        """Return whether the consumer of a delivery still has its message, as of the last ``settle``."""
        if self.receipt_state(ordinal, pop_ms) is not ReceiptState.LEASED:
            return False
        bunch = self.find(ordinal)
        return bunch is not None and not bunch.given_back

    def ordinals(self) -> list[int]:
        """Return the open messages, in order."""
        return sorted(ordinal for bunch in (*self._wide, *self._single.values()) for ordinal in bunch.ordinals())

    def is_waiting(self, ordinal: int) -> bool:
        """Return whether an open message waits to be given again, as of the last ``settle``."""
        return ordinal in self._waiting

    def is_lined(self, ordinal: int) -> bool:
        """Return whether an open message was never given because others with its key are before it."""
        return ordinal in self._lined

    def given_once(self, ordinals: Iterable[int]) -> int:
        """Return how many of some messages are open and were given once so far."""
        found = map(self.find, ordinals)
        return sum(bunch is not None and bunch.times == 1 for bunch in found)

    def is_claimed(self, ordinal: int) -> bool:
        """Return whether a message is on its way to the dead letters."""
        return ordinal in self._claimed

    def singles(self) -> list[int]:
        """Return the ordinals of the open messages that are alone in their bunch, in any order."""
        return list(self._single)

    def wide_from(self, ordinal: int, most: int) -> list[int]:
        """Return the lowest open ordinals from one on that are in bunches of several messages, at most so many."""
        found: list[int] = []
        for index in range(max(0, bisect_right(self._firsts, ordinal) - 1), len(self._wide)):
            found += islice((each for each in self._wide[index].ordinals() if each >= ordinal), most - len(found))
            if len(found) >= most:
                break
        return found

    def events(self, shift_ms: int) -> Iterator[LeaseEvent]:
        """Yield the whole state as events, without the messages on their way to the dead letters: the log has that before.

        All at once take more memory than the state itself. It must not change meanwhile.
        """
        return _whole(self.base, self.next, self._rows(shift_ms))

    def _rows(self, shift_ms: int) -> Iterator[Row]:
        for bunch in sorted((*self._wide, *self._single.values()), key=lambda bunch: bunch.first):
            bits = self._unclaimed(bunch)
            if bits:
                yield _row(bunch, bits, shift_ms)

    def _unclaimed(self, bunch: Bunch) -> int:
        bits = bunch.open
        for ordinal in self._claimed:
            if 0 <= ordinal - bunch.first < bits.bit_length():
                bits &= ~(1 << (ordinal - bunch.first))
        return bits

    def finishing_before(self, offset: int) -> list[LeaseEvent]:
        """Return the events that finish what is open before an offset."""
        bunches = [bunch for bunch in (*self._wide, *self._single.values()) if bunch.first < offset]
        events = [Acked(each.pop_ms, each.first, each.open & ((1 << (offset - each.first)) - 1)) for each in bunches]
        return [event for event in events if event.bits]

    # -- changing -----------------------------------------------------------------------------------------------------

    def apply(self, event: LeaseEvent, now_ms: int, shift_ms: int) -> None:
        """Change the state by an event. ``now_ms`` is monotonic."""
        self.version += 1
        match event:
            case Popped(pop_ms, due_ms, first, count, bits):
                self.next = max(self.next, first + count)
                self._add(Bunch(first, bits, pop_ms, _due(event, now_ms, shift_ms), 1, pop_ms))
            case Passed(following):
                self.next = max(self.next, following)
            case Repeated(pop_ms, _, ordinals, same_attempt):
                due_ms = _due(event, now_ms, shift_ms)
                for ordinal in ordinals:
                    self._lined.discard(ordinal)  # without the keys, a start has not seen that its turn had come
                    before = self._take_out(ordinal)
                    if before is not None:
                        self._add(
                            Bunch(ordinal, 1, pop_ms, due_ms, before.times + (not same_attempt), before.first_ms or pop_ms)
                        )
            case Lined(ordinals):
                for ordinal in ordinals:
                    self._line(Bunch(ordinal, 1, 0, NEVER, 0, 0))
            case Acked(pop_ms, first, bits):
                self._ack(pop_ms, first, bits)
            case Changed(pop_ms, ordinal, _, given_back):
                bunch = self.find(ordinal)
                if bunch is not None and bunch.pop_ms == pop_ms:
                    self._take_out(ordinal)
                    due_ms = _due(event, now_ms, shift_ms)
                    self._add(Bunch(ordinal, 1, pop_ms, due_ms, bunch.times, bunch.first_ms, given_back=given_back))
            case Dead(ordinal):
                self._take_out(ordinal)
                self._closed((ordinal,))
            case Reset(offset):
                self._clear(offset)
            case Forgotten():
                self._clear(0)
            case Whole(_, following, rows):
                self._clear(following)
                self._add_rows(rows, now_ms, shift_ms)
            case More(rows):
                self._add_rows(rows, now_ms, shift_ms)
                self.next = max([self.next, *map(_end, rows)])

    def learn(self, keys: Mapping[int, str]) -> None:
        """Learn the keys of all open messages. Those that are lined wait from when they are the first of theirs."""
        self.keys = KeyLines({ordinal: key for ordinal, key in keys.items() if self.find(ordinal) is not None})
        for ordinal in self.keys.firsts():
            self._let_wait(ordinal)
        for ordinal in self._lined - keys.keys():
            self._let_wait(ordinal)

    def forget_keys(self) -> None:
        """Let everything wait that is lined: keys do not count any more."""
        self.keys = None
        for ordinal in list(self._lined):
            self._let_wait(ordinal)

    def _let_wait(self, ordinal: int) -> None:
        """Have a message wait that was lined."""
        if ordinal in self._lined:
            self.version += 1
            self._lined.discard(ordinal)
            if ordinal not in self._claimed:
                self._wait(ordinal)

    def _wait(self, ordinal: int) -> None:
        """Have an open message wait to be given."""
        number: Any = ordinal  # one object for both, of 32 bytes
        self._waiting.add(number)
        heappush(self._waiting_heap, number)

    def _line(self, bunch: Bunch) -> None:
        self._add(bunch)
        self._lined.update(bunch.ordinals())

    def _closed(self, ordinals: Iterable[int]) -> None:
        """Let the next messages wait of the keys whose first messages are done."""
        if self.keys is not None:
            for ordinal in ordinals:
                self._lined.discard(ordinal)
                first = self.keys.closed(ordinal)
                if first is not None:
                    self._let_wait(first)
        elif self._lined:
            self._lined.difference_update(ordinals)

    def claim(self, ordinal: int) -> None:
        """Have an open message given to nobody: it is on its way to the dead letters."""
        self.version += 1
        self._waiting.discard(ordinal)
        self._claimed.add(ordinal)

    def release(self, ordinal: int, *, is_dead: bool) -> bool:
        """End a claim; return whether there was one. A message that did not die, and is still open, waits or is lined again."""
        if ordinal not in self._claimed:
            return False
        self._claimed.discard(ordinal)
        if not is_dead and ordinal not in self._lined and self.find(ordinal) is not None:
            self._wait(ordinal)
        return True

    def cut(self, end: int, shift_ms: int) -> list[LeaseEvent]:
        """Return the events that make the state fit a partition that ends at ``end``, because the log lost what followed."""
        if self.next <= end:
            return []
        state = self.events(shift_ms)
        rows = [row for event in state if isinstance(event, (Whole, More)) for row in event.rows if row.first < end]
        kept = [row._replace(bits=row.bits & ((1 << (end - row.first)) - 1)) for row in rows]
        return list(_whole(min(self.base, end), end, iter([row for row in kept if row.bits])))

    def _add_rows(self, rows: Iterable[Row], now_ms: int, shift_ms: int) -> None:
        for row in rows:
            if not row.times:
                self._line(Bunch(row.first, row.bits, 0, NEVER, 0, 0))
                continue
            due_ms = _remaining(row.pop_ms, row.due_ms, now_ms, shift_ms)
            given_back = row.given_back and row.bits == 1
            self._add(Bunch(row.first, row.bits, row.pop_ms, due_ms, row.times, row.first_ms, given_back=given_back))

    def _add(self, bunch: Bunch) -> None:
        if not bunch.open:
            return
        self.last_pop_ms = max(self.last_pop_ms, bunch.pop_ms)
        self.open += bunch.open.bit_count()
        self.delayed += bunch.given_back
        if bunch.open == 1:
            first: Any = bunch.first  # one object for both, of 32 bytes
            self._single[first] = bunch
            heappush(self._single_heap, first)
            if len(self._single_heap) > 2 * len(self._single) + SLACK:
                self._single_heap = sorted(self._single)
        else:
            index = bisect_right(self._firsts, bunch.first)
            self._firsts.insert(index, bunch.first)
            self._wide.insert(index, bunch)
        heappush(self._due, bunch)
        if len(self._due) > 2 * (len(self._wide) + len(self._single)) + SLACK:
            self._due = [each for each in self._due if each.open]
            heapify(self._due)

    def _ack(self, pop_ms: int, first: int, bits: int) -> None:
        index = bisect_right(self._firsts, first) - 1
        wide = self._wide[index] if index >= 0 else None
        if wide is not None and wide.pop_ms == pop_ms:  # many messages of one bunch, in one step
            mine = (wide.open >> (first - wide.first)) & bits
            if mine:
                shifted = mine << (first - wide.first)
                self._remove(index, wide, shifted)
                bits &= ~mine
                if self.keys is not None:
                    self._closed(Bunch(wide.first, shifted, 0, 0, 0, 0).ordinals())
        while bits:
            skipped = (bits & -bits).bit_length() - 1
            bits >>= skipped
            first += skipped
            bunch = self.find(first)
            if bunch is not None and bunch.pop_ms == pop_ms:
                self._take_out(first)
                self._closed((first,))
            bits >>= 1
            first += 1

    def _take_out(self, ordinal: int) -> Bunch | None:
        """Close a message in its bunch; return the bunch it was in."""
        single = self._single.pop(ordinal, None)
        if single is not None:
            self._end_delay(single)
            single.open = 0
            self.open -= 1
            self._waiting.discard(ordinal)
            return single
        bunch = self.find(ordinal)
        if bunch is not None:
            self._remove(bisect_right(self._firsts, ordinal) - 1, bunch, 1 << (ordinal - bunch.first))
        return bunch

    def _remove(self, index: int, bunch: Bunch, bits: int) -> None:
        """Close messages of a wide bunch, all of them open."""
        if self._waiting:
            self._waiting.difference_update(Bunch(bunch.first, bits, 0, 0, 0, 0).ordinals())
        bunch.open &= ~bits
        self.open -= bits.bit_count()
        if not bunch.open:
            del self._wide[index], self._firsts[index]

    def _end_delay(self, bunch: Bunch) -> None:
        self.delayed -= bunch.given_back
        bunch.end_delay()


def _whole(base: int, following: int, rows: Iterator[Row]) -> Iterator[LeaseEvent]:
    """Yield the events of a whole state, whose rows are in order.

    Until the last one, the state ends with the rows so far: when a power cut leaves only some of the events, what the others
    have is given again, and not taken for done.
    """
    portion: list[Row] = []
    end, is_more = base, False
    for row in rows:
        if len(portion) >= ROWS and row.first >= end:  # nothing that is still to come lies before the end
            yield More(portion) if is_more else Whole(base, end, portion)
            portion, is_more = [], True
        portion.append(row)
        end = max(end, _end(row))
    if is_more:
        yield More(portion)
        yield Passed(following)
    else:
        yield Whole(base, following, portion)


def _end(row: Row) -> int:
    """Return the ordinal after the last one of a row."""
    return row.first + row.bits.bit_length()


def _row(bunch: Bunch, bits: int, shift_ms: int) -> Row:
    due_ms = bunch.due_ms + shift_ms
    return Row(bunch.first, bits, bunch.pop_ms, due_ms, bunch.times, bunch.first_ms, bunch.given_back)


def _due(event: Popped | Repeated | Changed, now_ms: int, shift_ms: int) -> int:
    return _remaining(event.pop_ms, event.due_ms, now_ms, shift_ms)


def _remaining(pop_ms: int, due_ms: int, now_ms: int, shift_ms: int) -> int:
    """Return when a lease ends on the monotonic clock: never later than its whole length from now, whatever the clocks say."""
    return now_ms + max(0, min(due_ms - shift_ms - now_ms, due_ms - pop_ms))
