"""The in-sync set, the possible next masters, and what is acknowledged: decided by the master alone, on a manual clock."""

from collections.abc import Callable
from typing import Final

import pytest

from metaq.errors import ChangeUnknown
from metaq.replication.insync import InSync

OWN: Final = 1
LAG_S: Final = 3.0


class Case:
    """A master whose log ends at ``end``, and what it has had agreed on."""

    def __init__(self, minimum: int, eligible: frozenset[int] = frozenset()) -> None:
        self.now, self.end = 100.0, 1000
        self.agreed: list[set[int]] = []
        self.answers = True
        self.meanwhile: Callable[[], None] = lambda: None
        """Called while a set is being agreed on."""
        self.in_sync = InSync(
            own=OWN,
            minimum=minimum,
            lag_s=LAG_S,
            monotonic=lambda: self.now,
            own_end=lambda: self.end,
            agree=self._agree,
            changed=lambda: None,
            eligible=eligible,
        )

    def _agree(self, wanted: frozenset[int]) -> bool:
        self.agreed.append(set(wanted))
        self.meanwhile()
        if not self.answers:
            raise ChangeUnknown("no answer came")
        return True

    def standing(self) -> tuple[list[int], list[int]]:
        """Return the replicas that are in sync, and those that are eligible as the next master."""
        return sorted(self.in_sync.members), sorted(self.in_sync.eligible)

    def follow(self, *replicas: int) -> None:
        """They connect, and hold everything."""
        for replica in replicas:
            self.in_sync.joined(replica, "h:1", "h:2", self.end)
        self.hear(*replicas)

    def hear(self, *replicas: int) -> None:
        """They hold everything."""
        for replica in replicas:
            self.in_sync.reported(replica, self.end)
        self.in_sync.tick()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.in_sync.tick()


def group(minimum: int) -> Case:
    """One with two slaves in sync."""
    case = Case(minimum)
    case.follow(2, 3)
    assert case.in_sync.eligible == {1, 2, 3} == case.in_sync.members
    return case


def test_who_is_gone_stays_eligible_while_nothing_is_acknowledged() -> None:
    """F-PART, F-FAIL: a master that is alone is not the only one that may be elected, until enough others are there."""
    case = group(2)
    case.end = 2000
    case.pass_time(LAG_S + 1)
    assert case.standing() == ([1], [1, 2, 3])
    assert not case.in_sync.hopeful and case.in_sync.held_end == 1000
    case.hear(2)
    assert case.standing() == ([1, 2], [1, 2])
    assert case.in_sync.hopeful and case.in_sync.held_end == 2000


def test_who_is_enough_alone_leaves_others_behind() -> None:
    """F-PART: at min_in_sync 1 the master goes on, and others lack what it has acknowledged."""
    case = group(1)
    case.end = 2000
    case.pass_time(LAG_S + 1)
    assert case.in_sync.members == {1} == case.in_sync.eligible
    assert case.in_sync.held_end == 2000


def test_who_has_lost_its_log_is_not_eligible() -> None:
    """F-FAIL: it comes back with less than it had reported."""
    case = group(2)
    for replica in (2, 3):
        case.in_sync.left(replica)
    case.pass_time(LAG_S + 1)
    case.in_sync.joined(3, "h:1", "h:2", 500)
    case.in_sync.tick()
    assert case.in_sync.eligible == {1, 2}
    case.hear(3)
    assert case.in_sync.eligible == {1, 3} == case.in_sync.members


def test_who_has_lost_what_the_master_before_acknowledged_is_not_in_sync() -> None:
    """F-FAIL: a new master that could not agree on anything yet does not know how much that is, but what it was reported."""
    case = Case(2, frozenset((1, 2, 3)))
    case.answers = False
    case.follow(2)
    assert case.standing() == ([1, 2], [1, 2, 3]) and case.in_sync.held_end == 0
    case.in_sync.left(2)
    case.in_sync.joined(2, "h:1", "h:2", 500)
    case.in_sync.reported(2, 500)
    case.in_sync.tick()
    assert case.standing() == ([1], [1, 2, 3])
    assert case.agreed[-1] == {1, 3}
    case.hear(2)
    assert case.standing() == ([1, 2], [1, 2, 3])


def test_who_returns_with_less_while_a_set_is_agreed_on_is_not_in_sync() -> None:
    """F-FAIL: it would take itself for whole, and be elected without what it has lost."""
    case = group(2)

    def lose() -> None:
        case.in_sync.left(2)
        case.in_sync.joined(2, "h:1", "h:2", 400)

    case.meanwhile = lose
    case.in_sync.left(3)
    case.now += LAG_S + 1
    case.hear(2)
    assert case.agreed[-1] == {1, 2}
    assert case.in_sync.members == {1}
    case.meanwhile = lambda: None
    case.hear(2)
    assert case.in_sync.members == {1, 2}


@pytest.mark.parametrize("minimum", [1, 2])
def test_a_new_master_acknowledges_nothing_that_the_next_one_could_lack(minimum: int) -> None:
    """F-FAIL: as long as one of those that were eligible before may be elected, it is waited for."""
    case = Case(minimum, frozenset((1, 2, 3)))
    assert case.in_sync.held_end == 0
    case.follow(2)
    assert case.in_sync.eligible == {1, 2}
    assert case.in_sync.held_end == 1000


def test_sets_whose_fate_is_unknown_are_waited_for() -> None:
    """F-ZK: any of them may be what the next master is elected from."""
    case = Case(1)
    case.follow(2)
    case.answers = False
    case.follow(3)
    assert case.agreed[-1] == {1, 2, 3}
    case.end = 2000
    case.pass_time(LAG_S + 1)  # 3 may be eligible, and lags
    assert case.agreed[-1] == {1}
    case.hear(2)
    assert case.in_sync.held_end == 1000
    case.answers = True
    case.pass_time(0.1)
    assert case.in_sync.eligible == {1, 2}
    assert case.in_sync.held_end == 2000


def test_a_master_knows_for_how_long_it_has_heard_too_few() -> None:
    """F-PART: of those that must hold a put, the one that it has heard last but so many."""
    case = group(2)
    case.pass_time(1.0)
    case.hear(2)
    case.pass_time(5.0)
    assert case.in_sync.unheard_s == 5.0
    three = group(3)
    three.pass_time(1.0)
    three.hear(2)
    assert three.in_sync.unheard_s == 1.0
    assert group(1).in_sync.unheard_s == 0.0
    fresh = Case(2)
    fresh.pass_time(7.0)
    assert fresh.in_sync.unheard_s == 7.0


def test_a_master_alone_acknowledges_nothing() -> None:
    """F-FAIL: what it holds is safe when as many replicas as there must be are eligible, and not before."""
    case = Case(2)
    case.in_sync.tick()
    assert (case.in_sync.held_end, case.in_sync.eligible) == (0, frozenset({OWN}))
    case.follow(2)
    assert (case.in_sync.held_end, case.in_sync.eligible) == (1000, frozenset({OWN, 2}))
    assert Case(1).in_sync.held_end == 1000
