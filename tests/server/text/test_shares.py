"""Shares of partitions."""

from random import Random

import pytest

from metaq.server.text.shares import Shares

PARTITIONS = 8


def test_only_those_have_moved_whose_partitions_are_others() -> None:
    """Nobody else has to look again."""
    shares = Shares[str](lambda: PARTITIONS)
    for name in ("a", "b", "c", "d"):
        shares.add(name, name, None)
    assert shares.moved() == ["a", "b", "c", "d"]
    assert (shares.of("a"), shares.of("d"), shares.moved()) == ((0, 4), (3, 7), [])
    shares.add("e", "e", 7)
    assert (shares.of("d"), shares.of("e"), shares.moved()) == ((3,), (7,), ["e", "d"])
    shares.remove("e")
    assert shares.moved() == ["d"]


@pytest.mark.parametrize("seed", range(20))
def test_each_partition_has_one_owner_and_knows_the_former_ones(seed: int) -> None:
    """Whatever comes and goes; shares of those who asked for none differ by one at most."""
    rng, count, names = Random(seed), PARTITIONS, iter(range(1000))
    shares = Shares[int](lambda: count)
    owners: dict[int, int] = {}
    for _ in range(50):
        what = rng.choice(["join", "join", "leave", "ask", "grow"])
        if what == "leave" and shares.members:
            shares.remove(rng.choice(list(shares.members)))
        elif what == "grow":
            count += rng.randrange(2)
        else:
            shares.add(next(names), rng.choice("xyz"), rng.randrange(count) if what == "ask" else None)
        dealt = {member: shares.of(member) for member in shares.members}
        now = {partition: member for member, mine in dealt.items() for partition in mine}
        assert len(now) == sum(map(len, dealt.values()))
        plain = [len(dealt[member]) for member, (_, _, own) in shares.members.items() if own is None]
        assert not plain or (max(plain) - min(plain) <= 1 and sorted(now) == list(range(count)))
        for partition, member in owners.items():
            if member in shares.members and now.get(partition) != member:
                assert member in shares.former[partition]
        owners = now
