"""The state of a process that outlives a role: a replica that changes its role makes a new broker."""

from typing import TYPE_CHECKING

from metaq.engine.figures.history import History

if TYPE_CHECKING:
    from metaq.registry.processes import SeenProcess


class Lasting:
    """Knowledge of this process and of others that goes on with the next broker."""

    def __init__(self) -> None:
        self.history = History()
        """The figures of the last hours."""
        self.seen: dict[str, SeenProcess] = {}
        """The processes of the cluster that were seen (``metaq.registry.processes``)."""
