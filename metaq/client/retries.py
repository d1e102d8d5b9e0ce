"""PURE: how often something that failed is tried again, and the pauses in between."""

import random
from dataclasses import dataclass
from typing import Final

from metaq.client import checks

LEVELS_S: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""The delays that brokers know, levels 1 to 18, as they are configured by default."""
_MOST_EXPONENT: Final = 64
"""A greater power of a factor says no more, and would be too large for a number at some time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses that grow, in seconds: ``first``, then ``factor`` times as long each time, up to ``most``.

    Each pause is shortened by up to the share ``jitter`` of it, 0 to 1, at random, so that not all programs come back at once.
    """

    first: float = 1.0
    """The pause after the first failure."""
    factor: float = 2.0
    """The growth from one pause to the next; 1 for pauses of one length."""
    most: float = 30.0
    """The longest pause."""
    jitter: float = 0.25
    """The largest share of a pause that is left out at random."""

    def __post_init__(self) -> None:
        for name in ("first", "factor", "most", "jitter"):
            checks.seconds(name, getattr(self, name))
        for name, least, most in (("factor", 1.0, float("inf")), ("most", self.first, float("inf")), ("jitter", 0.0, 1.0)):
            if not least <= getattr(self, name) <= most:
                limits = f"from {least:g} {'on' if most == float('inf') else f'to {most:g}'}"
                raise checks.wrong(name, getattr(self, name), f"a number {limits}")

    def pause_s(self, failures: int) -> float:
        """Return the seconds to wait after a failure.

        Args:
            failures: the number of failures before it.
        """
        longest = min(self.most, self.first * self.factor ** min(failures, _MOST_EXPONENT))
        return longest * random.uniform(1.0 - self.jitter, 1.0)


READ_BACKOFF: Final = Backoff(first=0.2, most=5.0, jitter=0.5)
"""The pauses after pulls and pops that failed."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The number of further tries of something that failed, and the pauses before them; after the last one it is given up."""

    times: int
    """The number of further tries; 0 for none."""
    backoff: Backoff = Backoff()
    """The pauses before them."""

    def __post_init__(self) -> None:
        checks.number("times", self.times)
        if not isinstance(self.backoff, Backoff):
            raise checks.wrong("backoff", self.backoff, "a metaq.Backoff")


def check_retry(value: object) -> None:
    """Refuse what is neither a ``Retry`` nor ``None``."""
    if value is not None and not isinstance(value, Retry):
        raise checks.wrong("retry", value, "a metaq.Retry")


def level_for(seconds: float) -> int:
    """Return the delay level of a pause: the first one that is not shorter, or the last one."""
    return next((level for level, delay_s in enumerate(LEVELS_S, 1) if delay_s >= seconds), len(LEVELS_S))
