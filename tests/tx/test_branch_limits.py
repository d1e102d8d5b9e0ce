"""The bounds of the branch tables: limits, deadlines, memory; and local transactions, which share them."""

import random
import tracemalloc
from collections.abc import Callable

import pytest

from metaq.tx.branches import Branches
from metaq.tx.local import LocalBranches
from metaq.tx.openbranches import Counts
from metaq.tx.states import Decision
from metaq.tx.xid import Xid
from tests.tx.test_branches import KEY, LOCAL, NOTA, OTHER, PLACE, answer, room, to_prepared


def test_limits_name_themselves() -> None:
    """MQ-072: a limit answers XAER_RMERR, says which it is, and leaves everything as it was."""
    space = room(max_branches=3)
    table: Branches[str] = Branches(space)
    to_prepared(table)
    table.begin(OTHER, 0, 0)
    table.restore_heuristic("XID:1:0a:0d:app", Decision.COMMIT)
    got = answer(lambda: table.begin("XID:1:0a:0e:app", 0, 0))
    assert isinstance(got, str)
    assert got.startswith("XAException:code=-3,msg=3 transactions are open or undecided, the limit is 3 (max_branches)")
    table.begin(OTHER, 0, 0)
    table.put(OTHER, "m", 100)
    got = answer(lambda: table.put(OTHER, "n", 1))
    assert isinstance(got, str)
    assert got.startswith(
        "XAException:code=-3,msg=1 bytes more than 100 in one transaction are over the limit of 100 (max_branch_b"
    )
    local: LocalBranches[str] = LocalBranches(space)
    local.begin(1, LOCAL, 0, 0)
    got = answer(lambda: local.put(1, LOCAL, "n", 51))
    assert isinstance(got, str)
    assert got.startswith(
        "XAException:code=-3,msg=51 bytes more than 100 in all open transactions are over the limit of 150 (max_o"
    )
    local.put(1, LOCAL, "n", 50)
    assert table.prepare(OTHER) == ["m"]
    table.failed(OTHER)
    assert space.open_bytes == 50
    assert local.commit(1, LOCAL) == ["n"]
    assert space.open_bytes == 0


def test_deadlines() -> None:
    """MQ-072: seconds from the first BEGIN, cut to the longest; none without; a prepared branch has none."""
    space = room()
    table: Branches[str] = Branches(space)
    table.begin(KEY, 100, 10)
    table.begin(KEY, 105, 10)
    table.put(KEY, "m", 5)
    table.begin(OTHER, 100, 1000)
    table.begin("XID:1:0a:0d:app", 90, 0)
    table.begin("XID:1:0a:0e:app", 90, -5)
    table.begin("XID:1:0a:0f:app", 100, 10)
    table.put("XID:1:0a:0f:app", "m", 5)
    table.prepare("XID:1:0a:0f:app")
    table.prepared("XID:1:0a:0f:app", PLACE)
    assert table.expire(109.9) == []
    assert table.expire(110) == [KEY]
    assert space.open_bytes == 0
    assert answer(lambda: table.commit(KEY, one_phase=True)) == NOTA
    assert table.expire(160) == [OTHER]
    assert table.expire(1e9) == []
    assert table.counts() == Counts(2, 1, 0, 90)


def test_a_deadline_never_touches_a_later_branch_of_the_same_name() -> None:
    """MQ-072: the deadline of a branch that is gone is nobody's."""
    table: Branches[str] = Branches(room())
    table.begin(KEY, 0, 10)
    table.rollback(KEY)
    table.begin(KEY, 5, 10)
    assert table.expire(14) == []
    table.rollback(KEY)
    table.begin(KEY, 14, 0)
    assert table.expire(1e9) == []
    table.rollback(KEY)
    table.begin(KEY, 20, 10)
    table.put(KEY, "m", 1)
    table.prepare(KEY)
    assert table.expire(30) == []
    table.failed(KEY)
    table.begin(KEY, 31, 10)
    assert table.expire(40) == []
    assert table.expire(41) == [KEY]


def test_deadlines_of_short_transactions_take_no_memory() -> None:
    """MQ-072: branches that end at once leave no entry each until their deadline."""
    table: Branches[str] = Branches(room(max_branches=100))
    rng = random.Random(50)
    ends_s = {f"XID:2:{number:02x}:0b:app": rng.randrange(1, 60) for number in range(90)}
    tracemalloc.start()
    try:
        for key, timeout_s in ends_s.items():
            table.begin(key, 0, timeout_s)
            for _ in range(200):
                table.begin(KEY, 0, rng.randrange(1, 60))
                table.rollback(KEY)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 300_000
    for now_s in range(60):
        assert set(table.expire(now_s)) == {key for key, end_s in ends_s.items() if end_s == now_s}


@pytest.mark.slow
def test_memory_of_a_hundred_thousand_prepared_branches() -> None:
    """MQ-072: 100,000 undecided branches take at most 300 bytes each, with ids of 20 bytes as transaction managers make."""
    count = 100_000
    rng = random.Random(300)
    table: Branches[str] = Branches(room(max_branches=count))
    tracemalloc.start()
    try:
        for number in range(count):
            key = str(Xid(4660, rng.randbytes(20), rng.randbytes(20), "XAMessageProducer-host-17"))
            table.begin(key, 0, 60)
            table.put(key, "m", 1)
            table.prepare(key)
            table.prepared(key, (1 << 56) + number)
        del key
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.counts() == Counts(0, count, 0, None)
    assert held <= 300 * count
    assert len(table.recover("XAMessageProducer-host-17")) == count


# -- local transactions -----------------------------------------------------------------------------------------------------


def test_local_transactions() -> None:
    """MQ-108: every command, without a transaction and with one (specs: text protocol, 5.2)."""
    table: LocalBranches[str] = LocalBranches(room())
    unknown = f"Local transaction '{LOCAL}' has not been started."
    no_xid = f"XAException:code=-4,msg={LOCAL} is not a valid xid"

    def refusals() -> list[object]:
        calls: list[Callable[[], object]] = [
            lambda: table.put(1, LOCAL, "m", 1),
            lambda: table.commit(1, LOCAL),
            lambda: table.rollback(1, LOCAL),
            lambda: table.prepare(1, LOCAL),
        ]
        return [answer(call) for call in calls]

    assert refusals() == [unknown] * 4
    assert answer(lambda: table.forget(LOCAL)) == no_xid
    table.begin(1, LOCAL, 0, 0)
    table.begin(1, LOCAL, 0, 0)
    assert table.counts() == Counts(1, 0, 0, 0)
    table.put(1, LOCAL, "m", 1)
    table.put(1, LOCAL, "n", 1)
    assert answer(lambda: table.prepare(1, LOCAL)) == "XAException:code=-3,msg=Prepare not implemented on Local Transactions."
    assert answer(lambda: table.forget(LOCAL)) == no_xid
    assert table.commit(1, LOCAL) == ["m", "n"]
    assert refusals() == [unknown] * 4
    table.begin(1, LOCAL, 0, 0)
    assert table.commit(1, LOCAL) == []
    table.begin(1, LOCAL, 0, 0)
    table.rollback(1, LOCAL)
    assert refusals() == [unknown] * 4


def test_local_transactions_belong_to_their_connection() -> None:
    """MQ-108: another connection does not see them, and they end with their own, or with their time."""
    space = room(max_branches=3)
    table: LocalBranches[str] = LocalBranches(space)
    table.begin("a", LOCAL, 0, 0)
    table.put("a", LOCAL, "m", 1)
    assert answer(lambda: table.commit("b", LOCAL)) == f"Local transaction '{LOCAL}' has not been started."
    table.begin("b", LOCAL, 1, 0)
    table.put("b", LOCAL, "n", 1)
    table.begin("a", "TX:S1:2", 2, 10)
    table.put("a", "TX:S1:2", "o", 1)
    got = answer(lambda: table.begin("c", LOCAL, 2, 0))
    assert isinstance(got, str)
    assert "max_branches" in got
    assert table.expire(11) == []
    assert table.expire(12) == ["TX:S1:2"]
    assert table.close("a") == 1
    assert table.close("a") == 0
    assert table.counts() == Counts(1, 0, 0, 1)
    assert table.commit("b", LOCAL) == ["n"]
    assert space.open_bytes == 0
    assert table.close("b") == 0
