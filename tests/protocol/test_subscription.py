"""Tag expressions: how they are parsed, which messages pass at the broker, and which ones the client drops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import BadRequest, SubscriptionInvalid
from metaq.protocol.record import java_hash
from metaq.protocol.subscription import BLANKS, MAX_EXPRESSION_LENGTH, ExpressionKind, Subscription, parse_subscription

TAG_A = 2598919
TAG_B = 2598920

letters = st.characters(exclude_categories=["Cs"], exclude_characters="|")
named = st.text(letters, max_size=20).map(lambda tag: tag.strip(BLANKS)).filter(lambda tag: tag not in ("", "*"))
blanks = st.sampled_from(["", " ", "  ", "\t"])


@pytest.mark.parametrize("expression", ["*", "", "  ", " * "])
def test_everything(expression: str) -> None:
    """RD-028, SG-131: no expression, a blank one and ``*`` take every message, with and without tag."""
    subscription = parse_subscription("orders", expression, 7)
    assert subscription == Subscription("orders", "*", frozenset(), frozenset(), 7, ExpressionKind.TAG)
    assert all(subscription.matches_code(code) for code in (0, TAG_A, -(1 << 31)))
    assert subscription.matches_tag(None)
    assert subscription.matches_tag("TagA")


@pytest.mark.parametrize(
    ("expression", "codes"),
    [
        ("TagA", {TAG_A}),
        (" TagA ", {TAG_A}),
        ("TagA||TagB", {TAG_A, TAG_B}),
        ("TagA || TagB", {TAG_A, TAG_B}),
        ("TagA || || TagB ||", {TAG_A, TAG_B}),
        ("TagA||TagA", {TAG_A}),
        ("中文", {646394}),
        ("polygenelubricants", {-2147483648}),
        ("a|b", {java_hash("a|b")}),
        ("\u3000", {0x3000}),
    ],
)
def test_tags_have_the_hashes_of_java(expression: str, codes: set[int]) -> None:
    """RD-027, RD-028: tags between ``||``, blanks around them ignored, with the hashes of golden vector G37."""
    subscription = parse_subscription("orders", expression)
    assert subscription.codes == codes
    assert subscription.expression == expression
    assert not subscription.matches_code(0)
    assert not subscription.matches_tag(None)


def test_the_client_drops_a_stranger_with_the_same_hash() -> None:
    """RD-101: AaAa and BBBB have one hash; the broker passes both, the comparison of texts only one."""
    assert java_hash("AaAa") == java_hash("BBBB")
    subscription = parse_subscription("orders", "AaAa")
    assert subscription.matches_code(java_hash("BBBB"))
    assert not subscription.matches_tag("BBBB")
    assert subscription.matches_tag("AaAa")


@pytest.mark.parametrize("expression", ["||", " || ", "|| ||"])
def test_an_expression_without_a_tag_is_refused(expression: str) -> None:
    """RD-028: and the error is one after which the connection goes on."""
    with pytest.raises(SubscriptionInvalid, match="subscription to orders: there is no tag in") as caught:
        parse_subscription("orders", expression)
    assert isinstance(caught.value, BadRequest)


def test_limits_and_unknown_kinds_are_named() -> None:
    """RD-028: the refusal says which limit, or which words are known."""
    assert parse_subscription("orders", "a" * MAX_EXPRESSION_LENGTH).tags
    with pytest.raises(SubscriptionInvalid, match=f"limit of {MAX_EXPRESSION_LENGTH}"):
        parse_subscription("orders", "a" * (MAX_EXPRESSION_LENGTH + 1))
    with pytest.raises(SubscriptionInvalid, match="'XPATH' is unknown; use TAG or SQL92"):
        parse_subscription("orders", "a", kind="XPATH")


def test_a_filter_on_properties_passes_every_hash() -> None:
    """RD-102: its decision needs the properties, so nothing is dropped by tag."""
    subscription = parse_subscription("orders", "a > 1 || b", 3, "SQL92")
    assert subscription == Subscription("orders", "a > 1 || b", frozenset(), frozenset(), 3, ExpressionKind.SQL92)
    assert subscription.matches_code(0)
    assert subscription.matches_code(TAG_A)
    assert subscription.matches_tag(None)
    assert parse_subscription("orders", "TagA", kind="").kind is ExpressionKind.TAG


@given(st.lists(named, min_size=1, max_size=8), named, blanks, blanks)
def test_what_is_listed_passes_and_nothing_else(listed: list[str], other: str, before: str, after: str) -> None:
    """RD-027, RD-028, RD-101: for any tags and blanks between them."""
    subscription = parse_subscription("orders", f"{before}||{after}".join(listed))
    assert subscription.tags == set(listed)
    for tag in listed:
        assert subscription.matches_tag(tag)
        assert subscription.matches_code(java_hash(tag))
    assert subscription.matches_tag(other) == (other in listed)
    assert subscription.matches_code(java_hash(other)) or not subscription.matches_tag(other)


@given(st.text(max_size=200))
def test_any_text_is_a_subscription_or_refused(expression: str) -> None:
    """RD-028: no other error, whatever a client sends."""
    try:
        subscription = parse_subscription("orders", expression)
    except SubscriptionInvalid:
        assert expression.replace("|", "").strip(BLANKS) == "", expression
    else:
        assert len(subscription.codes) <= len(subscription.tags)
