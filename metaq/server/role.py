"""What a replica of a broker is from one opening of its store to the next."""

from typing import Final, NamedTuple


class Role(NamedTuple):
    """Master or slave."""

    is_master: bool = True
    epoch: int = 0
    """Of a master: the one that it begins, or a later one when its log knows it; 0: none, since it takes no slaves."""
    readable_end: int = 0
    """Where readers wait for the replicas: the log offset before which they may see everything from the start."""


ALONE: Final = Role()
"""A broker without replicas."""
