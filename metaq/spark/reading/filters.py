"""Batch reads that are reduced by the query's own conditions; only for PySpark from ``metaq.spark.versions.FILTERS`` on."""

from collections.abc import Iterable, Sequence
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

        Some are taken and yielded, because what is read has more rows: offsets found by time are only close (``CLOCK_SLACK``),
        and a list of offsets becomes the range from its least to its greatest.
        """
        for condition in filters:
            column, bounds = _bounds(condition)
            if bounds is not None:
                self.bounds[column] = self.bounds[column].both(bounds)
            if bounds is None or column == "timestamp" or (column == "offset" and isinstance(condition, In)):
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
    numbers = [number for value in values if (number := convert(value)) is not None]
    return column, _within(condition, numbers) if numbers and len(numbers) == len(values) else None


def _within(condition: Filter, numbers: Sequence[int]) -> Bounds | None:
    """Return what a condition on a number allows; ``numbers`` are its values, of which most conditions have one."""
    match condition:
        case EqualTo() | In():
            return Bounds(among=frozenset(numbers))
        case GreaterThan():
            return Bounds(low=numbers[0] + 1)
        case GreaterThanOrEqual():
            return Bounds(low=numbers[0])
        case LessThan():
            return Bounds(high=numbers[0])
        case LessThanOrEqual():
            return Bounds(high=numbers[0] + 1)
        case _:
            return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _micros(value: Any) -> int | None:
    if not isinstance(value, datetime):
        return None
    return ((value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
