"""The state of a process that outlives a role: a replica that changes its role makes a new broker."""

from dataclasses import dataclass, field

from metaq.engine.figures.history import History
from metaq.registry.processes import Processes


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of this process and of others, and goes on with the next broker."""

    history: History = field(default_factory=History)
    """The figures of the last hours."""
    processes: Processes = field(default_factory=Processes)
    """The processes of the cluster that were seen."""
