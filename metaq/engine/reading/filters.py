"""Filters of consumers: which messages of a partition they want, by tag or by an SQL92 expression."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from metaq.protocol.record import java_hash
from metaq.protocol.subscription import ExpressionKind, Subscription, parse_subscription

FILTERS_KEPT: Final = 512
"""Parsed subscriptions and compiled expressions that are cached."""
LONG: Final = 1024
"""Characters beyond which an expression takes much memory: fewer of these are cached."""
LONG_FILTERS_KEPT: Final = 8

Expression = Callable[[Mapping[str, str]], bool]


class Filter(NamedTuple):
    """A consumer's filter on a partition."""

    codes: frozenset[int] | None = None
    """Tag hashes; ``None`` accepts every tag."""
    tags: frozenset[str] | None = None
    """The tags that have these hashes; ``None``: the consumer compares them by itself."""
    matches: Expression | None = None
    """An SQL92 expression over the properties."""


EVERY_MESSAGE: Final = Filter()


def _make_filter(subscription: Subscription) -> Filter:
    if subscription.kind is ExpressionKind.SQL92:
        from metaq.protocol.sql92 import compile_expression  # noqa: PLC0415 - few brokers ever meet an expression

        return Filter(matches=compile_expression(subscription.expression))
    return Filter(subscription.codes or None)


_parse_short, _parse_long = lru_cache(FILTERS_KEPT)(parse_subscription), lru_cache(LONG_FILTERS_KEPT)(parse_subscription)
_filter_short, _filter_long = lru_cache(FILTERS_KEPT)(_make_filter), lru_cache(LONG_FILTERS_KEPT)(_make_filter)


def parse_cached(topic: str, expression: str, kind: str) -> Subscription:
    """Return a subscription as ``parse_subscription`` does, from a cache if it is known."""
    return (_parse_long if len(expression) > LONG else _parse_short)(topic, expression, kind=kind)


def filter_of(subscription: Subscription) -> Filter:
    """Return the filter of a subscription. Raise what ``compile_expression`` raises for a bad expression."""
    return (_filter_long if len(subscription.expression) > LONG else _filter_short)(subscription)


def exact_filter(subscription: Subscription) -> Filter:
    """Return the filter of a subscription that compares the tags, too: a message is not leased to who does not want it."""
    return filter_of(subscription)._replace(tags=subscription.tags or None)


def tag_filter(tag: str) -> Filter:
    """Return the filter that accepts one tag, whatever its characters."""
    return Filter(frozenset((java_hash(tag),)), frozenset((tag,)))
