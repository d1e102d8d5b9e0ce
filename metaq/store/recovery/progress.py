"""How far the opening of a store is: it may take minutes, and somebody waits for it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")

EVERY: Final = 256
"""Records or partitions from one step that is told to the next, some milliseconds."""


class Step(NamedTuple):
    """One part of a recovery. ``total`` is what there is at most: where the log ends is known when it is reached."""

    step: str
    done: int
    total: int
    unit: str


Tell = Callable[[Step], None]
"""Is told every few milliseconds, in the thread that opens the store; what it raises ends the opening."""


def nobody(step: Step) -> None:
    """Nobody waits."""


def telling(partitions: Sequence[T], step: str, tell: Tell) -> Iterator[T]:
    """Partitions, one by one, which is told of every ``EVERY``."""
    for done, partition in enumerate(partitions):
        if done % EVERY == 0:
            tell(Step(step, done, len(partitions), "partitions"))
        yield partition
