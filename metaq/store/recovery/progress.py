"""The progress of opening a store, which may take minutes while an operator or a client waits."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")

EVERY: Final = 256
"""Records or partitions between two reports of progress, which takes a few milliseconds."""


class RecoveryStep(NamedTuple):
    """The progress in one part of a recovery. ``total`` is an upper bound: the log's end is known only when it is reached."""

    step: str
    done: int
    total: int
    unit: str


Tell = Callable[[RecoveryStep], None]
"""A callback that gets a step every few milliseconds, in the thread that opens the store. Its errors end the opening."""


def nobody(step: RecoveryStep) -> None:
    """Ignore the progress."""


def telling(partitions: Sequence[T], step: str, tell: Tell) -> Iterator[T]:
    """Yield the partitions one by one, and report the progress to ``tell`` after every ``EVERY`` of them."""
    for done, partition in enumerate(partitions):
        if done % EVERY == 0:
            tell(RecoveryStep(step, done, len(partitions), "partitions"))
        yield partition
