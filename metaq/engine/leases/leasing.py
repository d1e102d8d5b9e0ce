"""The parts of the broker that lease messages, as those who speak to consumers use them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from metaq.engine.context import Context
from metaq.engine.leases.clocks import ConsumerClocks
from metaq.engine.leases.figures import LeaseFigures
from metaq.engine.leases.leases import Leases
from metaq.engine.leases.moving import Moves
from metaq.engine.leases.poison import Poison
from metaq.engine.leases.popping import Pops
from metaq.engine.leases.waiting import WaitingLines
from metaq.engine.turn import Turns


@dataclass(frozen=True, slots=True)
class Leasing:
    """The states, and what is done with them."""

    leases: Leases
    moves: Moves
    poison: Poison
    pops: Pops
    lines: WaitingLines
    figures: LeaseFigures
    clocks: ConsumerClocks

    @classmethod
    def open(cls, context: Context, turns: Turns, timer: Callable[[float], Any]) -> Self:
        """Learn the states from the log; ``timer`` makes timers of the loop."""
        leases = Leases(context, turns)
        moves = Moves(context, leases, turns)
        poison = Poison(context, leases, moves, turns)
        pops = Pops(context, leases, poison)
        lines = WaitingLines(leases, pops, timer)
        figures, clocks = LeaseFigures(context, leases, lines), ConsumerClocks(context.store.clock)
        return cls(leases, moves, poison, pops, lines, figures, clocks)
