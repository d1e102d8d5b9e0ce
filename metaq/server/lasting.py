"""The state of a process that outlives a role: a replica that changes its role makes a new broker."""

from dataclasses import dataclass, field

from metaq.engine.figures.history import History
from metaq.registry.processes import SeenProcesses


@dataclass(frozen=True, slots=True)
class Lasting:
    """Knowledge of this process and of others that goes on with the next broker."""

    history: History = field(default_factory=History)
    """The figures of the last hours."""
    processes: SeenProcesses = field(default_factory=SeenProcesses)
    """The processes of the cluster that were seen."""
