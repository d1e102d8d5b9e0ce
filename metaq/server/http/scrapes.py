"""Scrapes: made one at a time, in short slices of the loop's time, and abandoned when they take too long.

A scrape may read the disk, which may not answer. So each is made in a greenlet of its own, and a client waits for at most
``SCRAPE_S``, the wait for a previous scrape included. A scrape that hangs occupies one thread, however many more are requested.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

import gevent

from metaq.engine.figures.metrics import Family, write
from metaq.errors import Overloaded
from metaq.store.files.filecache import Rest

SCRAPE_S: Final = 9.0
"""One second less than a connection has, which leaves time to report why there is no answer."""
SLICE_S: Final = 0.002
"""How long other greenlets wait while metrics are written, and"""
REST_S: Final = 0.008
"""how long they then run: a scrape takes at most a fifth of the time."""
RETRY_MS: Final = 10_000


class Scrapes:
    """Makes the text of all metrics."""

    def __init__(self, families: Callable[[Rest], Iterator[Family]]) -> None:
        """Prepare. ``families`` calls its argument between the steps of its work."""
        self._families = families
        self._made: gevent.Greenlet[[], str | Exception] | None = None
        self._waits = False

    def text(self) -> str:
        """Return the current metrics as text.

        Raise ``Overloaded`` when another scrape waits already, or this one takes too long.
        """
        if self._waits:
            raise Overloaded("one scrape runs, and another one waits for it", retry_after_ms=RETRY_MS)
        late = Overloaded(f"no scrape is done within {SCRAPE_S:g} s; does the disk answer?", retry_after_ms=RETRY_MS)
        with gevent.Timeout(SCRAPE_S, late):
            if self._made is not None and not self._made.dead:
                self._waits = True
                try:
                    self._made.join()
                finally:
                    self._waits = False
            self._made = made = gevent.spawn(self._make)
            text = made.get()
        if isinstance(text, Exception):
            raise text
        return text

    def _make(self) -> str | Exception:
        """Return the text, or an exception as a value: if it were raised, the hub would print it although it is handled."""
        slices = Slices()
        try:
            return "".join(write(self._families(slices.rest_when_due), slices.rest_when_due))
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception as error:  # noqa: BLE001 - raised again by ``text``
            return error


class Slices:
    """Lets other greenlets run each time that some work has taken ``SLICE_S``."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._worked_s = 0.0

    def rest_when_due(self) -> None:
        worked_s = time.monotonic() - self._began
        if worked_s >= SLICE_S:
            self._worked_s += worked_s
            gevent.sleep(REST_S)
            self._began = time.monotonic()

    @property
    def worked_s(self) -> float:
        """The seconds of work so far, without the rests."""
        return self._worked_s + time.monotonic() - self._began
