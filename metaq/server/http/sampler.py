"""Sampling of the history: the figures come from where the metrics come from, so both say the same."""

import time
from collections import Counter
from functools import partial
from typing import Final, NamedTuple

from metaq.engine.figures.history import Figures
from metaq.engine.figures.statistics import Sample
from metaq.server.http.brokermetrics import BrokerMetrics
from metaq.server.http.scrapes import Slices
from metaq.store.figures import StoreFigures
from metaq.store.files.filecache import Rest

LAG_SHARE: Final = 100
"""Summing up the lags of all groups takes 1 % of the time at most: as many times as long passes before it is done again."""


class _Counted(NamedTuple):
    """Counts since the start, from which rates are made."""

    put: Sample
    got: Sample
    refused: int
    processor_s: float
    at_s: float


class Sampler:
    """Adds samples of one broker to the history."""

    def __init__(self, metrics: BrokerMetrics, rest: Rest) -> None:
        """Prepare. ``rest`` lets others run, and returns after the end of a turn."""
        self._metrics = metrics
        self._rest = rest
        self._before = self._counted()
        self._lag = 0
        self._lags_due_s = 0.0

    def sample(self) -> None:
        """Sample the statistics, and add one sample to the history.

        Raise ``StoreError`` when the disk cannot be looked at.
        """
        metrics, history = self._metrics, self._metrics.history
        store, context = metrics.context.store, metrics.context
        context.statistics.sample(self._rest)
        usage = metrics.run(partial(store.disk.usage, store.directory))
        log, health = StoreFigures.of(store), context.replicas.health()
        self._sum_lags()
        now, before = self._counted(), self._before
        self._before = now
        put, put_bytes = _rates(before.put, now.put)
        got, got_bytes = _rates(before.got, now.got)
        elapsed_s = max(now.at_s - before.at_s, 1e-9)
        figures = Figures(
            put_per_second=put,
            put_bytes_per_second=put_bytes,
            got_per_second=got,
            got_bytes_per_second=got_bytes,
            refused_per_second=(now.refused - before.refused) / elapsed_s,
            processor_ratio=(now.processor_s - before.processor_s) / elapsed_s,
            lag=self._lag,
            longest_stall_seconds=history.take_longest_stall(),
            replica_lag_bytes=max((slave.lag_bytes for slave in health.slaves), default=health.lag_bytes),
            disk_used_ratio=usage.ratio,
            log_bytes=log.end - log.begin,
            connections=metrics.endpoint.connections,
            gets_waiting=metrics.holds.of_clients,
            leases_open=metrics.leases.leases.open,
            timers_pending=metrics.timers.pending,
        )
        history.add(context.store.clock.now_ms(), figures)

    def _sum_lags(self) -> None:
        """Sum up the lags of all groups, unless that took long not long ago: then the last sum stands."""
        if time.monotonic() < self._lags_due_s:
            return
        slices, lags, metrics = Slices(), Counter[str](), self._metrics
        for group, topic in metrics.lags.pairs(slices.rest_when_due):
            lags[group] += metrics.lags.of(group, topic, slices.rest_when_due)
        self._lag = lags.total()
        self._lags_due_s = time.monotonic() + LAG_SHARE * slices.worked_s
        if metrics.history.wants_lags:
            metrics.history.add_lags(metrics.context.store.clock.now_ms(), lags)

    def _counted(self) -> _Counted:
        put, got = self._metrics.context.statistics.sampled()
        refused = self._metrics.context.counters.refused.total()
        return _Counted(put, got, refused, time.process_time(), time.monotonic())


def _rates(before: Sample, now: Sample) -> tuple[float, float]:
    """Return the messages and the bytes a second between two samples."""
    elapsed_s = now.at_s - before.at_s
    if elapsed_s <= 0:
        return 0.0, 0.0
    counted = now.totals.messages - before.totals.messages, now.totals.size - before.totals.size
    return counted[0] / elapsed_s, counted[1] / elapsed_s
