"""A consumer's subscription to one topic, and the parsing of its tag expression (specs: remoting protocol, section 5.1).

A tag expression is ``*`` or empty for everything, or tags separated by ``||``: ``TagA || TagB``. For pulls, the broker compares
only the hashes of the tags with the hash in each index unit. So messages with another tag of the same hash pass, and the client
compares the tags themselves; for leases the broker does it. SQL92 expressions are not parsed here:
``sql92.compile_expression`` does that.
"""

import enum
from typing import Final, NamedTuple

from metaq.errors import SubscriptionInvalid
from metaq.protocol.record import java_hash

EVERYTHING: Final = "*"
SEPARATOR: Final = "||"
MAX_EXPRESSION_LENGTH: Final = 1 << 14
"""Characters of a tag expression, and of all expressions of one heartbeat: hashing the tags takes some milliseconds."""
BLANKS: Final = "".join(map(chr, range(0x21)))
"""The characters that Java's ``trim`` removes around a tag. To remove Unicode's other blanks too would change the hash."""


class ExpressionKind(enum.StrEnum):
    """The language of a subscription's expression; the values are those on the wire."""

    TAG = "TAG"
    SQL92 = "SQL92"


class Subscription(NamedTuple):
    """The subscription of a consumer group to one topic, from a heartbeat or a pull."""

    topic: str
    expression: str
    """As the client wrote it; ``*`` when that was empty."""
    tags: frozenset[str]
    """Empty for everything, and for SQL92."""
    codes: frozenset[int]
    """The Java hashes of the tags, as index units keep them."""
    version: int
    """Grows with each change; milliseconds from Java, nanoseconds from Go."""
    kind: ExpressionKind

    def matches_code(self, code: int) -> bool:
        """Return whether a message with this tag hash (0: no tag) may match; true for SQL92, which needs the properties."""
        return not self.codes or code in self.codes

    def matches_tag(self, tag: str | None) -> bool:
        """Return whether a message with this tag matches: clients drop messages with another tag of the same hash by it."""
        return not self.tags or tag in self.tags


def parse_subscription(topic: str, expression: str, version: int = 0, kind: str = ExpressionKind.TAG) -> Subscription:
    """Return the subscription that a client's expression means; an empty ``kind`` is TAG.

    ``SubscriptionInvalid`` when the kind is unknown, or a tag expression is too long or has no tag. SQL92 is not checked.
    """
    if (kind or ExpressionKind.TAG) not in ExpressionKind.__members__:
        known = " or ".join(ExpressionKind)
        raise SubscriptionInvalid(f"subscription to {topic}: expression type {kind[:32]!r} is unknown; use {known}")
    if kind == ExpressionKind.SQL92:
        return Subscription(topic, expression, frozenset(), frozenset(), version, ExpressionKind.SQL92)
    if len(expression) > MAX_EXPRESSION_LENGTH:
        reason = f"a tag expression of {len(expression)} characters is over the limit of {MAX_EXPRESSION_LENGTH}"
        raise SubscriptionInvalid(f"subscription to {topic}: {reason}")
    words = expression.strip(BLANKS)
    if words in ("", EVERYTHING):
        return Subscription(topic, EVERYTHING, frozenset(), frozenset(), version, ExpressionKind.TAG)
    tags = frozenset(tag.strip(BLANKS) for tag in words.split(SEPARATOR)) - {""}
    if not tags:
        raise SubscriptionInvalid(
            f"subscription to {topic}: there is no tag in {expression[:64]!r}; write TagA || TagB, or * for all"
        )
    return Subscription(topic, expression, tags, frozenset(map(java_hash, tags)), version, ExpressionKind.TAG)
