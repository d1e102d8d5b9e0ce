"""Batch reads that are reduced by the query's own conditions; only for PySpark from ``metaq.spark.versions.FILTERS`` on."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from metaq.spark.reading.batch import PUSHED, BatchReader
from metaq.spark.reading.ranges import ANY, Bounds

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class FilteringReader(BatchReader):
    """A batch read that skips messages which the query's own conditions exclude.

    Spark refuses it unless its setting ``spark.sql.python.filterPushdown.enabled`` is on.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take conditions on topic, partition, offset and timestamp, and yield those that Spark must still apply.

        Conditions on the timestamp are taken and yielded: offsets found by time are only close (``CLOCK_SLACK``).
        """
        for condition in filters:
            column, bounds = _bounds(condition)
            if bounds is not None:
                self.bounds[column] = self.bounds[column].both(bounds)
            if bounds is None or column == "timestamp":
                yield condition


def _bounds(condition: Filter) -> tuple[str, Bounds | None]:
    """Return the column of a condition and the values that it allows; ``None`` for values when it is not understood."""
    column = ".".join(getattr(condition, "attribute", ()))
    if column not in PUSHED:
        return column, None
    if isinstance(condition, IsNotNull):
        return column, ANY
    values = condition.value if isinstance(condition, In) else (getattr(condition, "value", None),)
    if column == "topic":
        known = isinstance(condition, EqualTo | In) and all(isinstance(value, str) for value in values)
        return column, Bounds(among=frozenset(values)) if known else None
    convert = _micros if column == "timestamp" else _whole
    numbers = [convert(value) for value in values]
    whole = [number for number in numbers if number is not None]
    if not whole or len(whole) != len(numbers):
        return column, None
    value = whole[0]
    makers: dict[type[Filter], Callable[[], Bounds]] = {
        EqualTo: lambda: Bounds(among=frozenset(whole)),
        In: lambda: Bounds(among=frozenset(whole)),
        GreaterThan: lambda: Bounds(low=value + 1),
        GreaterThanOrEqual: lambda: Bounds(low=value),
        LessThan: lambda: Bounds(high=value),
        LessThanOrEqual: lambda: Bounds(high=value + 1),
    }
    make = makers.get(type(condition))
    return column, None if make is None else make()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _micros(value: Any) -> int | None:
    if not isinstance(value, datetime):
        return None
    return ((value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
