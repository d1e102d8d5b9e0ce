"""The parts of the broker that delay messages to any time, as those who speak to clients use them."""

from dataclasses import dataclass
from typing import Self

from metaq.engine.context import Context
from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.timers.cancelling import Cancels
from metaq.engine.timers.delivery import Delivery
from metaq.engine.timers.keeping import TimerKeeper
from metaq.engine.timers.recurring import RecurringMessages, Runs
from metaq.engine.timers.timers import Timers
from metaq.engine.turn import Turns
from metaq.store.files.filecache import Run


@dataclass(frozen=True, slots=True)
class Timing:
    """The timers, and what is done with them."""

    timers: Timers
    dedupe: Dedupe
    """The ids of messages, which a cancel releases."""
    cancels: Cancels
    recurring: RecurringMessages
    delivery: Delivery
    keeper: TimerKeeper

    @classmethod
    def open(cls, context: Context, turns: Turns, run: Run) -> Self:
        """Open the table of timers, if the log has any."""
        timers, runs = Timers(context, turns, run), Runs(context, run)
        dedupe = Dedupe(context, turns, timers.parked_handle, run)
        cancels = Cancels(timers, dedupe, run)
        recurring, delivery = RecurringMessages(timers, cancels, runs), Delivery(timers, runs, run)
        return cls(timers, dedupe, cancels, recurring, delivery, TimerKeeper(timers, runs, run))

    def stop(self) -> None:
        """Deliver no more, and read no more of the log."""
        self.keeper.stop()
        self.delivery.stop()
        self.timers.stop()
