"""Every schedule of seven steps over two branches, and a sample of longer random ones.

A schedule is a path through a graph: two that lead to the same state of the model, of the snapshot, of the log after it and of
what is on its way there are continued once. The two branches are alike, so a state and its mirror image are one. A step is a
command that stays on its way, a command with its outcome, one half of a commit that reads first, the end of a turn, its sync, a
failure, a duty, or an end of the process. Every command is tried in every state, so a frame that is delayed or repeated is
among them. After each step everything is compared with the model (``tests.crash.schedule``), the other branch too.

At level DISK the seven steps are 1,449 states and 20,685 edges, at MEMORY 1,546 and 21,971. Paths that were never joined would
be 54⁷.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pytest

from metaq.message import Durability
from metaq.store.files.documents import read_document
from metaq.store.files.filecache import read_here
from tests.crash import transactions
from tests.crash.driver import quiet
from tests.crash.schedule import KEYS, STEPS, LosesAll, Schedule, settings
from tests.support.faultydisk import DATA, Stopped
from tests.support.samples import seed_of_tree

BRANCHES: Final = KEYS[:2]
MIRRORS: Final = [dict(zip(BRANCHES, names, strict=True)) for names in ("ab", "ba")]
LONGEST: Final = 7
READ_FIRST: Final = ("commit", "decide commit")
GRAPHS: Final = {Durability.DISK: (1449, 20_685), Durability.MEMORY: (1546, 21_971)}
"""States and edges."""
SAMPLE: Final = 3_000

Operation = Callable[[Schedule], bool]
"""Does one step; false, and nothing has changed, when it makes no sense now."""


def command(do: str, key: str, schedule: Schedule) -> bool:
    """A command, whose outcome follows."""
    if do == "begin":
        schedule.begin(key)
    elif do == "put":
        schedule.put(key)
    else:
        schedule.step(do, key)
    return True


def whole(do: str, key: str, schedule: Schedule) -> bool:
    """A command and its outcome, with those of all before it."""
    schedule.step(do, key)
    schedule.finish()
    return True


def append(schedule: Schedule) -> bool:
    if not schedule.staged:
        return False
    schedule.append()
    return True


def fail(schedule: Schedule) -> bool:
    """The disk has no room for what was staged."""
    if not schedule.staged:
        return False
    schedule.append(full=True)
    return True


def sync(schedule: Schedule) -> bool:
    if not schedule.parked:
        return False
    schedule.sync()
    return True


def late(schedule: Schedule) -> bool:
    """The outcome is told although the disk has not answered."""
    if not schedule.parked:
        return False
    schedule.late()
    return True


def end(schedule: Schedule, *, power: bool) -> bool:
    schedule.end(power=power)
    schedule.open()
    return True


def torn(schedule: Schedule) -> bool:
    """The process ends in the middle of an append."""
    if not schedule.staged:
        return False
    schedule.disk.stop_at = schedule.disk.calls + 1
    with suppress(Stopped):
        schedule.store.append()
    schedule.end(power=False)
    schedule.open()
    return True


def expire(schedule: Schedule) -> bool:
    if not schedule.model.open:
        return False
    schedule.expire()
    return True


def save(schedule: Schedule) -> bool:
    if not schedule.told_since_save:
        return False
    schedule.save()
    return True


def keep(schedule: Schedule) -> bool:
    """Prepared branches are put again, as before retention."""
    before = len(schedule.staged)
    schedule.keep(schedule.store.log.end, read_here)
    return len(schedule.staged) > before


def look(do: str, key: str, schedule: Schedule) -> bool:
    """A commit whose messages have to be read first, while others go on."""
    schedule.look(do, key)
    return True


def found(key: str, schedule: Schedule) -> bool:
    """They have been read."""
    if key not in schedule.reading:
        return False
    schedule.found(key)
    return True


def not_found(key: str, schedule: Schedule) -> bool:
    """They are damaged."""
    if key not in schedule.reading:
        return False
    schedule.not_found(key)
    return True


def operations() -> Iterator[tuple[str, Operation]]:
    for key in BRANCHES:
        for do in ("begin", "put", *STEPS):
            yield f"{do} {key}", partial(command, do, key)
        for do in STEPS:
            yield f"{do} {key}, done", partial(whole, do, key)
        for do in READ_FIRST:
            yield f"look to {do} {key}", partial(look, do, key)
        yield f"found {key}", partial(found, key)
        yield f"not found {key}", partial(not_found, key)
    yield from (("append", append), ("sync", sync), ("late", late), ("fail", fail), ("torn", torn))
    yield from (("expire", expire), ("save", save), ("keep", keep))
    yield from (("kill", partial(end, power=False)), ("power cut", partial(end, power=True)))


OPERATIONS: Final = dict(operations())


def state(schedule: Schedule) -> str:
    """Return everything that the future depends on; it is the same for a state and its mirror image."""
    saved, _ = read_document(schedule.disk, DATA / "config" / "transactions.json")
    return min(_state(schedule, saved or {"next": 0, "prepared": [], "heuristic": []}, name) for name in MIRRORS)


def _state(schedule: Schedule, saved: dict[str, Any], name: dict[str, str]) -> str:
    model = schedule.model
    log = [
        (act.do, name.get(act.key), len(act.messages), act.outcome, number < model.durable)
        for number, (act, ordinal) in enumerate(model.log)
        if ordinal >= saved["next"]
    ]
    return repr(
        (
            sorted((name[key], len(messages), key in model.busy) for key, messages in model.open.items()),
            [(name[key], len(messages), key in model.busy) for key, messages in model.told.prepared.items()],
            [(name[key], outcome, key in model.busy) for key, outcome in model.told.heuristic.items()],
            log,
            [(name[key], size) for key, _, size, *_ in saved["prepared"]],
            [(name[key], outcome) for key, outcome, *_ in saved["heuristic"]],
            [(each.act.do, name.get(each.act.key), each.act.outcome) for each in schedule.staged],
            [(each.act.do, name.get(each.act.key), each.act.outcome, each.failed) for each in schedule.parked],
            sorted((name[key], do) for key, (do, _) in schedule.reading.items()),
            schedule.told_since_save,
        )
    )


def replay(path: Sequence[str], durability: Durability) -> Schedule:
    """A schedule from its beginning."""
    schedule = Schedule(LosesAll(0), settings(durability))
    for name in path:
        OPERATIONS[name](schedule)
    return schedule


def explore(durability: Durability) -> tuple[int, int]:
    """Go through the graph; how many states and edges it has."""
    frontier: list[tuple[Sequence[str], str]] = [((), state(replay((), durability)))]
    seen = {before for _, before in frontier}
    edges = 0
    for _ in range(LONGEST):
        following: list[tuple[Sequence[str], str]] = []
        for path, before in frontier:
            schedule = replay(path, durability)
            for name, operation in OPERATIONS.items():
                after = _followed(schedule, path, name, operation)
                if after is None:
                    continue
                edges += 1
                if after == before:
                    continue
                if after not in seen:
                    seen.add(after)
                    following.append(((*path, name), after))
                schedule = replay(path, durability)
        frontier = following
    return len(seen), edges


def _followed(schedule: Schedule, path: Sequence[str], name: str, operation: Operation) -> str | None:
    """One edge; the state it leads to."""
    try:
        if not operation(schedule):
            return None
        schedule.check()
        return state(schedule)
    except Exception as error:
        raise AssertionError(f"{' | '.join((*path, name))}: {error!r}") from error


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("durability", GRAPHS)
def test_every_schedule_of_seven_steps(durability: Durability) -> None:
    """MQ-071, MQ-075, MQ-076, MQ-107, F-TX: committed once and whole, rolled back never, prepared stays, others untouched."""
    with quiet():
        states, edges = explore(durability)
    least_states, least_edges = GRAPHS[durability]
    assert states >= least_states
    assert edges >= least_edges


def test_a_few_longer_schedules() -> None:
    """MQ-071, MQ-107, MQ-108, F-TX: of the random ones, others for each commit."""
    assert transactions.run(seed_of_tree(), 150).cases >= 150


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_longer_schedules() -> None:
    """MQ-071, MQ-107, MQ-108, F-TX: a sample of the random ones, in which everything that they are about happens."""
    result = transactions.run(seed_of_tree(), SAMPLE)
    assert result.cases >= SAMPLE
    assert min(result.details.values()) > SAMPLE // 100, result.details
