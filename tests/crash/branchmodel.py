"""A model of what transactions promise: a list of acts, and what is open in memory (see ``schedule``)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metaq.tx.states import Decision
from metaq.tx.steps import Step
from metaq.tx.xacodes import XaCode

HEURISTIC: Final = {Decision.COMMIT: XaCode.HEURCOM, Decision.ROLLBACK: XaCode.HEURRB, Decision.COMPLETE: XaCode.HEURHAZ}


class Message(NamedTuple):
    """One message as it was put."""

    partition: int
    payload: bytes
    message_id: int


class Act(NamedTuple):
    """The meaning of one group of records. ``again``: a branch was parked once more; its mark says which one."""

    do: str
    key: str
    messages: tuple[Message, ...] = ()
    outcome: Decision | None = None
    again: bool = False


class Logged(NamedTuple):
    """An act and the ordinal of its mark."""

    act: Act
    ordinal: int


class Table:
    """The state that a sequence of acts leads to."""

    def __init__(self, acts: Sequence[Logged] = ()) -> None:
        self.prepared: dict[str, tuple[Message, ...]] = {}
        self.heuristic: dict[str, Decision] = {}
        self.delivered: list[Message] = []
        for logged in acts:
            self.apply(logged.act)

    def apply(self, act: Act) -> None:
        """One more."""
        if act.do == "prepare":
            if act.key:
                self.prepared[act.key] = act.messages
        elif act.do == "forget":
            self.heuristic.pop(act.key, None)
        else:
            self.prepared.pop(act.key, None)
        if act.do == "heuristic":
            assert act.outcome is not None
            self.heuristic[act.key] = act.outcome
        if act.do == "commit" or act.outcome is Decision.COMMIT:
            self.delivered += act.messages

    def same_branches(self, other: "Table") -> bool:
        return self.prepared == other.prepared and self.heuristic == other.heuristic


@dataclass(slots=True)
class Flight:
    """A step whose outcome is open."""

    act: Act
    step: Step
    ordinal: int
    end: int = 0
    failed: bool = False


@dataclass
class Model:
    """The state that must be true now."""

    open: dict[str, list[Message]] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    told: Table = field(default_factory=Table)
    """Without acts whose outcome is open."""
    log: list[Logged] = field(default_factory=list)
    durable: int = 0
    """Acts that survive a power cut."""
    synced: int = 0
    """Acts that readers see at level DISK; a checkpoint makes more of them durable than that."""

    def refusal(self, command: str, key: str) -> XaCode | None:
        """The code with which a command is refused (specs: text protocol, 5.3 and 5.6)."""
        if key in self.busy:
            return XaCode.RMFAIL
        if command in ("begin", "forget"):
            return None
        if key in self.open:
            return XaCode.PROTO if command == "commit" or command.startswith("decide") else None
        if key in self.told.prepared:
            return XaCode.PROTO if command in ("put", "prepare") else None
        outcome = self.told.heuristic.get(key)
        return XaCode.NOTA if outcome is None else HEURISTIC[outcome]
