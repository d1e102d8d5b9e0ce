"""PURE: one leased message as its consumer knows it, and the pauses before it is delivered again."""

from typing import Final

from metaq.client.message import ReceivedMessage
from metaq.protocol.remoting.leases.receipts import Receipt

BACK_OFF_S: Final = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""The pauses after the first failed delivery of a message, the second, and so on; RocketMQ's Java client has the same ones."""


def back_off_s(attempt: int) -> int:
    """Return the seconds until a message comes again whose delivery number ``attempt`` has failed."""
    return BACK_OFF_S[min(attempt, len(BACK_OFF_S)) - 1]


class Lease:
    """A message, the receipt by which its broker knows this delivery, and the end of its time. Guarded by its consumer."""

    __slots__ = ("__weakref__", "ends_s", "invisible_s", "is_extending", "is_finished", "lost", "message", "receipt")

    def __init__(self, message: ReceivedMessage, receipt: Receipt, now_s: float, invisible_s: float) -> None:
        """Begin when the message arrives. Times are those of ``time.monotonic``, whatever the clock of the broker says."""
        self.message = message
        self.receipt = receipt
        self.invisible_s = invisible_s
        self.ends_s = now_s + invisible_s
        self.is_extending = False
        """True while a request to extend it is in flight."""
        self.is_finished = False
        """True once its program has acked it, given it back or rejected it."""
        self.lost = ""
        """The reason why the broker did not extend it; empty while it did."""

    @property
    def attempt(self) -> int:
        """The number of this delivery: 1 for the first."""
        return self.message.reconsume_times + 1

    def is_usable(self, now_s: float) -> bool:
        """Return whether the message can still be expected to be this consumer's."""
        return not self.lost and now_s < self.ends_s

    def wants_extension(self, now_s: float) -> bool:
        """Return whether it should be extended now: half of its time is over."""
        is_due = now_s >= self.ends_s - self.invisible_s / 2
        return is_due and not (self.is_extending or self.is_finished or self.lost)

    def extend(self, now_s: float, seconds: float) -> None:
        """Take over that the broker was asked at ``now_s`` to let it end so many seconds later."""
        self.is_extending = False
        self.ends_s = now_s + seconds
