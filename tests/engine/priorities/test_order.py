"""The order of a pop over the partitions of a topic with priorities: R-1, and R-2 by simulation."""

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.engine.priorities.order import ReadyPartition, pop_order

WAIT_MS = 1000
READY = st.dictionaries(st.integers(0, 9), st.integers(0, 3 * WAIT_MS)).map(
    lambda ages: [ReadyPartition(*pair) for pair in ages.items()]
)


@given(READY, st.integers(0, 100), st.integers(0, 10_000), st.sampled_from([0, WAIT_MS]))
def test_a_higher_level_is_passed_over_by_the_brakes_only(
    ready: list[ReadyPartition], factor: int, pops: int, max_wait_ms: int
) -> None:
    """R-1: all are looked at, once each; whoever is before a higher level is aged, or the one whose turn it is."""
    order = pop_order(ready, levels=10, factor=factor, pops=pops, max_wait_ms=max_wait_ms)
    ages = dict(ready)
    assert sorted(order) == sorted(ages)
    aged = [partition for partition in order if max_wait_ms and ages[partition] > max_wait_ms]
    assert order[: len(aged)] == aged
    assert [ages[partition] for partition in aged] == sorted((ages[partition] for partition in aged), reverse=True)
    rest = order[len(aged) :]
    passing = [low for at, low in enumerate(rest) if any(high > low for high in rest[at + 1 :])]
    assert len(passing) <= (factor < 100)
    assert passing in ([], rest[:1])


@given(st.integers(0, 100), st.integers(0, 1000), st.integers(2, 10))
def test_so_many_of_a_hundred_pops_go_by_priority(factor: int, start: int, levels: int) -> None:
    """MY-034: counted, not by chance; of the others each partition begins as often as any other."""
    ready = [ReadyPartition(partition, 0) for partition in range(levels)]
    count = 100 * levels
    orders = [
        pop_order(ready, levels=levels, factor=factor, pops=pops, max_wait_ms=WAIT_MS) for pops in range(start, start + count)
    ]
    begun = Counter(order[0] for order in orders)
    turns = count * (100 - factor) // 100
    assert [begun[partition] for partition in range(levels - 1)] == [turns // levels] * (levels - 1)
    assert all(order[1:] == sorted(order[1:], reverse=True) for order in orders)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=200, max_size=200),
    st.integers(0, 100),
    st.integers(1, 3),
)
def test_every_message_is_given_after_its_wait_and_what_is_older(arrivals: list[list[int]], factor: int, most: int) -> None:
    """R-2: one pop each 10 ms, whatever comes: once a message has aged, each pop takes one that is at least as old."""
    queues: dict[int, deque[int]] = {partition: deque() for partition in range(5)}
    wait_ms, now, pops = 300, 0, 0
    due: dict[tuple[int, int], int] = {}  # messages of a partition and a time: the pops after which they are given
    while any(queues.values()) or arrivals:
        for partition in arrivals.pop() if arrivals else ():
            queues[partition].append(now)
        ready = [ReadyPartition(partition, now - queue[0]) for partition, queue in queues.items() if queue]
        for partition, queue in queues.items():
            for stored in queue:
                if now - stored > wait_ms and (partition, stored) not in due:
                    older = sum(other <= stored for waiting in queues.values() for other in waiting)
                    due[partition, stored] = pops + older
        taken = 0
        for partition in pop_order(ready, levels=5, factor=factor, pops=pops, max_wait_ms=wait_ms):
            while queues[partition] and taken < most:
                queues[partition].popleft()
                taken += 1
        now, pops = now + 10, pops + 1
        late = [key for key, limit in due.items() if limit <= pops and key[1] in queues[key[0]]]
        assert not late
