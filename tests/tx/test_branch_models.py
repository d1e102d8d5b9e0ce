"""The branch tables against models that remember everything that happened and derive the rest from it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from metaq.tx.branches import Branches, Work
from metaq.tx.local import LocalBranches
from metaq.tx.openbranches import Counts, Room
from metaq.tx.states import Decision
from metaq.tx.xacodes import XaError

MAX_BRANCHES: Final = 5
MAX_BRANCH_BYTES: Final = 10
MAX_OPEN_BYTES: Final = 16
MAX_TIMEOUT_S: Final = 8
KEYS: Final = ["XID:1:0a:0b:app", "XID:1:0a:0b:app2", "XID:1:0a:0b", "XID:2:0a:0b:app"]
CODES: Final = {Decision.COMMIT: 7, Decision.ROLLBACK: 6, Decision.COMPLETE: 8}
BUSY, NOTA, PROTO, RMERR = -7, -4, -6, -3

keys = st.sampled_from([*KEYS, *KEYS[:2]])
"""Mostly two, so that much happens to one."""
outcomes = st.sampled_from(list(Decision))
timeouts = st.integers(-1, 12)
sizes = st.integers(0, 7)


def room() -> Room:
    return Room(
        max_branches=MAX_BRANCHES,
        max_branch_bytes=MAX_BRANCH_BYTES,
        max_open_transaction_bytes=MAX_OPEN_BYTES,
        max_timeout_s=MAX_TIMEOUT_S,
    )


def answer(call: Callable[[], object]) -> object:
    """Return the result of a command, or the code with which it is refused."""
    try:
        return call()
    except XaError as error:
        return int(error.code)


@dataclass
class Life:
    """Everything that is true of one key now."""

    messages: list[tuple[int, int]] | None = None
    """(number, size) of what an open branch holds."""
    began_s: int = 0
    ends_s: int | None = None
    place: int | None = None
    outcome: Decision | None = None
    step: str | None = None
    deciding: Decision | None = None

    @property
    def refusal(self) -> int | None:
        """The code of every command that needs an undecided branch."""
        if self.step is not None:
            return BUSY
        if self.messages is not None or self.place is not None:
            return None
        return NOTA if self.outcome is None else CODES[self.outcome]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.messages or [])


@dataclass
class Event:
    """Something that happened to a key; ``number`` and ``extra`` are what its kind needs."""

    kind: str
    key: str
    number: int = 0
    extra: int | None = None
    outcome: Decision | None = None


@dataclass
class Story:
    """All events since the broker began, crashes among them, and lives derived from them."""

    events: list[Event] = field(default_factory=list)

    def tell(self, kind: str, key: str, number: int = 0, extra: int | None = None, outcome: Decision | None = None) -> None:
        self.events.append(Event(kind, key, number, extra, outcome))

    def life(self, key: str) -> Life:
        life = Life()
        for event in self.events:
            if event.key in (key, "all"):
                self._live(life, event)
        return life

    @staticmethod
    def _live(life: Life, event: Event) -> None:
        match event.kind:
            case "begin":
                life.messages, life.began_s, life.ends_s = [], event.number, event.extra
            case "put":
                assert life.messages is not None
                life.messages.append((event.number, event.extra or 0))
            case "gone":
                life.messages = None
            case "crash":
                life.messages = life.step = None
            case "moved":
                life.place = event.number
            case "prepared":
                life.messages, life.place, life.step = None, event.number, None
            case "failed":
                life.messages = life.step = None
            case "done":
                if life.step == "forget":
                    life.outcome = None
                elif life.step == "decide":
                    life.outcome = life.deciding
                if life.step != "forget":
                    life.messages = life.place = None
                life.step = None
            case step:
                life.step, life.deciding = step, event.outcome


class BranchMachine(RuleBasedStateMachine):
    """Commands, their second halves in any order, deadlines, moves and crashes over four keys."""

    def __init__(self) -> None:
        super().__init__()
        self.room = room()
        self.table: Branches[int] = Branches(self.room)
        self.story = Story()
        self.now_s = 0
        self.numbers = 0
        self.parked: dict[int, list[int]] = {}
        self.marks: list[Callable[[Branches[int]], None]] = []
        self.visible: list[int] = []
        self.dropped: set[int] = set()

    def lives(self) -> dict[str, Life]:
        return {key: self.story.life(key) for key in KEYS}

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def drop(self, life: Life) -> None:
        self.dropped.update(number for number, _ in life.messages or [])

    # -- commands -----------------------------------------------------------------------------------------------------

    @rule(key=keys, timeout_s=timeouts)
    def begin(self, key: str, timeout_s: int) -> None:
        lives = self.lives()
        life = lives[key]
        taken = sum(
            (each.messages is not None) + (each.place is not None) + (each.outcome is not None) for each in lives.values()
        )
        expected: object = None
        if life.step is not None:
            expected = BUSY
        elif life.messages is None and life.place is None:
            expected = RMERR if taken >= MAX_BRANCHES else None
            if expected is None:
                ends_s = self.now_s + min(timeout_s, MAX_TIMEOUT_S) if timeout_s > 0 else None
                self.story.tell("begin", key, self.now_s, ends_s)
        assert answer(lambda: self.table.begin(key, self.now_s, timeout_s)) == expected

    @rule(key=keys, size=sizes)
    def put(self, key: str, size: int) -> None:
        life = self.story.life(key)
        number = self.number()
        expected: object = life.refusal
        if expected is None and life.messages is None:
            expected = PROTO
        elif expected is None:
            held = sum(each.size for each in self.lives().values())
            if life.size + size > MAX_BRANCH_BYTES or held + size > MAX_OPEN_BYTES:
                expected = RMERR
            else:
                self.story.tell("put", key, number, size)
        assert answer(lambda: self.table.put(key, number, size)) == expected

    @rule(key=keys)
    def prepare(self, key: str) -> None:
        life = self.story.life(key)
        expected: object = life.refusal
        if expected is None and life.messages is None:
            expected = PROTO
        elif expected is None:
            expected = [number for number, _ in life.messages or []]
            self.story.tell("prepare" if expected else "gone", key)
        assert answer(lambda: self.table.prepare(key)) == expected

    @rule(key=keys, one_phase=st.booleans())
    def commit(self, key: str, one_phase: bool) -> None:
        life = self.story.life(key)
        expected: object = life.refusal
        if expected is None and life.messages is not None and not one_phase:
            expected = PROTO
        elif expected is None:
            expected = Work([number for number, _ in life.messages or []], life.place)
            self.story.tell("commit", key)
        assert answer(lambda: self.table.commit(key, one_phase=one_phase)) == expected

    @rule(key=keys)
    def rollback(self, key: str) -> None:
        life = self.story.life(key)
        expected: object = life.refusal
        if expected is None:
            expected = Work([number for number, _ in life.messages or []], life.place)
            self.drop(life)
            self.story.tell("rollback" if life.messages is None else "gone", key)
        assert answer(lambda: self.table.rollback(key)) == expected

    @rule(key=keys)
    def forget(self, key: str) -> None:
        life = self.story.life(key)
        expected: object = BUSY
        if life.step is None:
            expected = life.outcome is not None and life.messages is None and life.place is None
            if expected:
                self.story.tell("forget", key)
        assert answer(lambda: self.table.forget(key)) == expected

    @rule(key=keys, outcome=outcomes)
    def decide(self, key: str, outcome: Decision) -> None:
        life = self.story.life(key)
        expected: object = life.refusal
        if expected is None and life.messages is not None:
            expected = PROTO
        elif expected is None:
            expected = Work([], life.place)
            self.story.tell("decide", key, outcome=outcome)
        assert answer(lambda: self.table.decide(key, outcome)) == expected

    # -- second halves ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), succeeds=st.booleans())
    def second_half(self, data: st.DataObject, succeeds: bool) -> None:
        busy = [key for key, life in self.lives().items() if life.step is not None]
        if busy:
            self.end(data.draw(st.sampled_from(busy)), succeeds)

    @rule(key=keys, outcome=st.none() | outcomes)
    def whole_branch(self, key: str, outcome: Decision | None) -> None:
        """Prepare a branch in one go, decided by hand or not: single steps seldom reach that by chance."""
        self.begin(key=key, timeout_s=3)
        self.put(key=key, size=1)
        self.prepare(key=key)
        self.end(key, succeeds=True)
        if outcome is not None:
            self.decide(key=key, outcome=outcome)
            self.end(key, succeeds=True)

    def end(self, key: str, succeeds: bool) -> None:
        life = self.story.life(key)
        if life.step is None:
            return
        if succeeds:
            place = self.log(key, life)
            if life.step == "prepare":
                self.table.prepared(key, place)
                self.story.tell("prepared", key, place)
            else:
                self.table.done(key)
                self.story.tell("done", key)
            return
        self.drop(life)
        self.table.failed(key)
        self.story.tell("failed", key)

    def log(self, key: str, life: Life) -> int:
        """Write the mark that a busy branch waits for, and what is behind it; its place."""
        place = self.number()
        numbers = [number for number, _ in life.messages or []]
        if life.step == "prepare":
            self.parked[place] = numbers
            self.marks.append(lambda table: table.restore_prepared(key, place))
            return place
        if life.step == "forget":
            self.marks.append(lambda table: table.restore_forgotten(key))
            return place
        committed = life.step == "commit" or life.deciding is Decision.COMMIT
        numbers += [] if life.place is None else self.parked[life.place]
        if committed:
            self.visible += numbers
        else:
            self.dropped.update(numbers)
        outcome = life.deciding
        if life.step == "decide" and outcome is not None:
            self.marks.append(lambda table: table.restore_heuristic(key, outcome))
        else:
            self.marks.append(lambda table: table.restore_decided(key))
        return place

    @rule(key=keys)
    def move(self, key: str) -> None:
        life = self.story.life(key)
        place = self.number()
        if life.place is not None:
            self.parked[place] = self.parked[life.place]
            self.marks.append(lambda table: table.restore_prepared(key, place))
            self.story.tell("moved", key, place)
        self.table.move(key, place)

    # -- time and crashes ---------------------------------------------------------------------------------------------

    @rule(seconds=st.integers(0, 6))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        expired = []
        for key, life in self.lives().items():
            if life.messages is not None and life.step is None and life.ends_s is not None and life.ends_s <= self.now_s:
                expired.append(key)
                self.drop(life)
                self.story.tell("gone", key)
        assert sorted(self.table.expire(self.now_s)) == sorted(expired)

    @rule(reached=st.lists(st.booleans(), min_size=len(KEYS), max_size=len(KEYS)), replay_from=st.floats(0, 1))
    def crash(self, reached: list[bool], replay_from: float) -> None:
        """Crash with some steps in flight already in the log; the snapshot may be older than marks that are applied again."""
        for (key, life), kept in zip(self.lives().items(), reached, strict=True):
            if life.step is not None and kept:
                place = self.log(key, life)
                self.story.tell("prepared" if life.step == "prepare" else "done", key, place)
            else:
                self.drop(life)
        self.story.tell("crash", "all")
        self.room = room()
        self.table = Branches(self.room)
        for mark in (*self.marks, *self.marks[int(replay_from * len(self.marks)) :]):
            mark(self.table)

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def tables_agree(self) -> None:
        lives = self.lives()
        places = {key: life.place for key, life in lives.items() if life.place is not None}
        by_hand = {key: life.outcome for key, life in lives.items() if life.outcome is not None}
        began = [life.began_s for life in lives.values() if life.messages is not None]
        assert dict(self.table.places()) == places
        assert dict(self.table.heuristics()) == by_hand
        assert {key: self.table.place(key) for key in KEYS} == {key: life.place for key, life in lives.items()}
        assert self.table.counts() == Counts(len(began), len(places), len(by_hand), min(began, default=None))
        assert self.room.open_bytes == sum(life.size for life in lives.values())
        assert self.table.recover(None) == sorted(places.keys() | by_hand.keys())
        assert self.table.recover("app") == sorted((places.keys() | by_hand.keys()) & {KEYS[0], KEYS[3]})

    @invariant()
    def messages_have_one_outcome(self) -> None:
        assert len(self.visible) == len(set(self.visible))
        assert not self.dropped.intersection(self.visible)


class LocalMachine(RuleBasedStateMachine):
    """Local transactions of three connections over two keys."""

    def __init__(self) -> None:
        super().__init__()
        self.room = room()
        self.table: LocalBranches[int] = LocalBranches(self.room)
        self.open: list[tuple[int, str, int | None, list[int]]] = []
        """Owner, key, when it ends, sizes of what it holds, in the order of their begin."""
        self.now_s = 0

    def find(self, owner: int, key: str) -> tuple[int, str, int | None, list[int]] | None:
        return next((each for each in self.open if each[:2] == (owner, key)), None)

    owners = st.integers(1, 3)
    names = st.sampled_from(["TX:S:1", "TX:S:2"])

    @rule(owner=owners, key=names, timeout_s=timeouts)
    def begin(self, owner: int, key: str, timeout_s: int) -> None:
        expected = None
        if self.find(owner, key) is None:
            if len(self.open) < MAX_BRANCHES:
                ends_s = self.now_s + min(timeout_s, MAX_TIMEOUT_S) if timeout_s > 0 else None
                self.open.append((owner, key, ends_s, []))
            else:
                expected = RMERR
        assert answer(lambda: self.table.begin(owner, key, self.now_s, timeout_s)) == expected

    @rule(owner=owners, key=names, size=sizes)
    def put(self, owner: int, key: str, size: int) -> None:
        found = self.find(owner, key)
        expected = NOTA if found is None else None
        if found is not None:
            held = sum(sum(each[3]) for each in self.open)
            if sum(found[3]) + size > MAX_BRANCH_BYTES or held + size > MAX_OPEN_BYTES:
                expected = RMERR
            else:
                found[3].append(size)
        assert answer(lambda: self.table.put(owner, key, size, size)) == expected

    @rule(owner=owners, key=names, commit=st.booleans())
    def end(self, owner: int, key: str, commit: bool) -> None:
        found = self.find(owner, key)
        expected: object = NOTA
        if found is not None:
            self.open.remove(found)
            expected = found[3] if commit else None
        end = self.table.commit if commit else self.table.rollback
        assert answer(lambda: end(owner, key)) == expected

    @rule(owner=owners)
    def close(self, owner: int) -> None:
        left = [each for each in self.open if each[0] == owner]
        self.open = [each for each in self.open if each[0] != owner]
        assert self.table.close(owner) == len(left)

    @rule(seconds=st.integers(0, 6))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        expired = [each for each in self.open if each[2] is not None and each[2] <= self.now_s]
        self.open = [each for each in self.open if each not in expired]
        assert sorted(self.table.expire(self.now_s)) == sorted(each[1] for each in expired)

    @invariant()
    def tables_agree(self) -> None:
        assert self.table.counts().open == len(self.open)
        assert self.room.open_bytes == sum(sum(each[3]) for each in self.open)


def test_any_order_of_commands_second_halves_deadlines_and_crashes() -> None:
    """MQ-071, MQ-072, MQ-075, MQ-076: as the model has it; committed once, rolled back never, prepared until decided."""
    run_state_machine_as_test(BranchMachine, settings=settings(max_examples=100, stateful_step_count=40))


def test_any_order_of_local_transactions() -> None:
    """MQ-108: as the model has it, each connection for itself."""
    run_state_machine_as_test(LocalMachine, settings=settings(max_examples=60, stateful_step_count=30))
