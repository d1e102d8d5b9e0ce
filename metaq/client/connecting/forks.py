"""Clients in a forked process: the objects that it inherited are renewed.

The child of a fork has copies of all objects and descriptors, but of the threads only the one that forked. An inherited client
has connections whose answers the parent's threads read, locks that may never be released, and ids that the parent uses, too.
Every object that holds such things registers here, and is renewed in each child before the program continues there.
"""

import os
from typing import Final, Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """An object that a child of a fork cannot use as it was copied."""

    def _renew(self) -> None:
        """Take new locks, connections and threads for this process, or become unusable and raise an error when used.

        It is called while no other thread runs. It waits for nothing and starts nothing, because most children never use the
        objects they inherit. It closes descriptors but shuts no connection down, because the connections are the parent's.
        """
        ...


MADE_BEFORE: Final = "was made before this process was forked from the one that it belongs to; make one here"

_inherited: WeakSet[Inherited] = WeakSet()


def renewed_in_children(thing: Inherited) -> None:
    """Register an object to be renewed in every child of a fork, as long as the object exists."""
    _inherited.add(thing)


def _in_child() -> None:
    for thing in list(_inherited):
        thing._renew()


os.register_at_fork(after_in_child=_in_child)
