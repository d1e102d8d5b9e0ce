"""What a forked process does with clients that it inherited.

The child of a fork has copies of all objects and descriptors, and of the threads only the one that forked. So of a client it
has connections whose answers the parent's threads read, locks that nobody will ever release, and ids that the parent gives out,
too. Everything that holds such things registers here, and is renewed in each child before the program goes on there.
"""

import os
from typing import Final, Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """What a fork copies and a child cannot use as it is."""

    def renew(self) -> None:
        """Have locks, connections and threads of this process's own, or be of no use here, and say so when used.

        Called where no other thread runs. It waits for nothing and starts nothing: most children never use what they
        inherit. Descriptors are closed, but no connection is shut down, because it is the parent's.
        """
        ...


MADE_BEFORE: Final = "was made before this process was forked from the one that it belongs to; make one here"

_inherited: WeakSet[Inherited] = WeakSet()


def renewed_in_children(thing: Inherited) -> None:
    """Have a thing renewed in every child, as long as it is there."""
    _inherited.add(thing)


def _in_child() -> None:
    for thing in list(_inherited):
        thing.renew()


os.register_at_fork(after_in_child=_in_child)
