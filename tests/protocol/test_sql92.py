"""SQL92 filters: a table of cases, random filters against a direct evaluation, and garbage."""

import operator
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metaq.errors import SubscriptionInvalid
from metaq.protocol.sql92 import MAX_LENGTH, MAX_NESTING, MOST_SEARCHES, compile_expression

Properties = Mapping[str, str]

COMPLEX: Final = "a=3 and b<>4 And c>5 AND d<=4"
ANY: Final = "a=3 or b<>4 Or c>5 OR d<=4"
BIG: Final = 9223372036854775807

CASES: Final[list[tuple[str, Properties, bool]]] = [
    # all and any
    (COMPLEX, {"a": "3", "b": "5", "c": "6", "d": "1"}, True),
    (COMPLEX, {"a": "4", "b": "5", "c": "6", "d": "1"}, False),
    (COMPLEX, {"a": "3", "b": "5", "c": "6"}, False),
    (COMPLEX.replace(" ", "  \t\n"), {"a": "3", "b": "5", "c": "6", "d": "1"}, True),
    (ANY, {"a": "3"}, True),
    (ANY, {"a": "4", "b": "5"}, True),
    (ANY, {"a": "4", "b": "4", "c": "6"}, True),
    (ANY, {"a": "4", "b": "4", "c": "3", "d": "2"}, True),
    (ANY, {"a": "4", "b": "4", "c": "3", "d": "10"}, False),
    (ANY, {}, False),
    # IN
    ("a in ('3', '4', '5')", {"a": "4"}, True),
    ("a in ('3', '4', '5')", {"a": "8"}, False),
    ("a in ('3', '4', '5')", {}, False),
    ("a not in ('3', '4', '5')", {"a": "8"}, True),
    ("a not in ('3', '4', '5')", {"a": "5"}, False),
    ("a not in ('3', '4', '5')", {}, False),
    ("not (a in ('3'))", {}, False),
    ("(a not in ('6', '4', '5')) or (b in ('3', '4', '5'))", {"a": "6", "b": "5"}, True),
    # BETWEEN
    ("a between 2 and 10", {"a": "2"}, True),
    ("a between 2 and 10", {"a": "10"}, True),
    ("a between 2 and 10", {"a": "9.99"}, True),
    ("a between 2 and 10", {"a": "1"}, False),
    ("a between 2 and 10", {"a": "11"}, False),
    ("a between 2 and 10", {}, False),
    ("a between 2 and 2", {"a": "2"}, True),
    ("a between '2' and '10'", {"a": "3"}, True),
    ("a between low and high", {"a": "3.14", "low": "3", "high": "4"}, True),
    ("a between low and high", {"a": "3.14", "low": "4", "high": "3"}, False),
    ("a between low and high", {"a": "3.14"}, False),
    ("a between low and high", {"a": "3.14", "low": "low", "high": "high"}, False),
    ("a not between low and high", {"a": "3.14", "low": "low", "high": "high"}, False),
    ("5 between low and high", {"low": "5", "high": "5"}, True),
    ("a not between 2 and 10", {"a": "1"}, True),
    ("a not between 2 and 10", {"a": "11"}, True),
    ("a not between 2 and 10", {"a": "2"}, False),
    ("a not between 2 and 10", {"a": "10"}, False),
    ("a not between 2 and 10", {}, False),
    ("(a between 2 and 10) AND (b not between 6 and 9)", {"a": "2", "b": "5"}, True),
    ("a between 0 and 100", {"a": "abc"}, False),
    ("a is not null and a between 0 and 100", {"a": "con"}, False),
    ("a between 0 and 1 and b = 'x'", {"a": "1", "b": "x"}, True),
    # NULL
    ("a is null", {"b": "2"}, True),
    ("a is null", {"a": "2"}, False),
    ("a IS NOT NULL", {"a": ""}, True),
    ("a is not null", {"b": "2"}, False),
    ("a is null OR a='hello'", {}, True),
    ("a is null OR a='hello'", {"a": "hello"}, True),
    ("a is null OR a='hello'", {"a": "abc"}, False),
    ("a is not null and a='hello'", {"a": "hello"}, True),
    ("a is not null and a='hello'", {}, False),
    ("(a = 1) is null", {}, True),
    ("a = 1 or b = 1", {"b": "1"}, True),
    ("not (a = 1 and b = 1)", {"b": "2"}, True),
    ("not (a = 1 and b = 1)", {"b": "1"}, False),
    ("not a = 1", {}, False),
    ("a <> b", {"a": "1"}, False),
    # texts
    ("a=b", {"a": "3.14", "b": "3.14"}, True),
    ("a<>b", {"a": "3.14", "b": "3.14"}, False),
    ("a<>b", {"a": "3.14", "b": "3.141"}, True),
    ("a=b", {"a": "1.0", "b": "1"}, False),
    ("a>b", {"a": "10", "b": "9"}, True),
    ("a>b", {"a": "10", "b": "20"}, False),
    ("a>b", {"a": "x", "b": "w"}, False),
    ("not (a>b)", {"a": "x", "b": "w"}, True),
    ("a='A'", {"a": "a"}, False),
    ("A='a'", {"a": "a"}, False),
    ("TAGS is not null and TAGS='''''tag'''''", {"TAGS": "''tag''"}, True),
    ("a = ''", {"a": ""}, True),
    ("'x' = a", {"a": "x"}, True),
    ("a = '中文'", {"a": "中文"}, True),
    # numbers
    ("a > 3.1E10", {"a": "31415000000.0"}, True),
    ("a > 3.14", {"a": "3.1415"}, True),
    ("a = 3", {"a": "3.0"}, True),
    ("a = 3", {"a": "three"}, False),
    ("a <> 3", {"a": "three"}, False),
    ("a = 3 or b = 'x'", {"a": "three", "b": "x"}, False),
    ("b = 'x' or a = 3", {"a": "three", "b": "x"}, True),
    ("a > 3", {"a": ""}, False),
    ("a < 0", {"a": "-1"}, True),
    ("a = -5", {"a": "-5"}, True),
    ("a = - 5 and b = +5", {"a": "-5", "b": "5"}, True),
    (f"a = {BIG}", {"a": str(BIG)}, True),
    (f"a = {BIG}", {"a": str(BIG - 1)}, False),
    (f"a = -{BIG + 1}", {"a": str(-BIG - 1)}, True),
    ("a = 12L", {"a": "12"}, True),
    ("a > .5 and a < 5.", {"a": "1"}, True),
    ("a = 0.0", {"a": "0"}, True),
    ("a > 1", {"a": "1e999"}, False),
    ("a > 1", {"a": "NaN"}, False),
    ("a > 1", {"a": "１２"}, False),
    ("1 = 1", {}, True),
    ("1 <> 1", {}, False),
    # truth
    ("a=TRUE OR b=FALSE", {"a": "true", "b": "false"}, True),
    ("a=TRUE OR b=FALSE", {"a": "false", "b": "true"}, False),
    ("a=TRUE", {"a": "True"}, True),
    ("a=TRUE", {}, False),
    ("a=FALSE", {"a": "anything"}, True),
    ("a", {"a": "TRUE"}, True),
    ("not a", {"a": "no"}, True),
    ("not a", {}, False),
    ("true", {}, True),
    ("FALSE or not false", {}, True),
    ("(a = 1) = TRUE", {"a": "1"}, True),
    ("TRUE = 1", {}, False),
    # NOT, precedence
    ("not a = 1 and b = 1", {"a": "2", "b": "1"}, True),
    ("NOT NOT a = 1", {"a": "1"}, True),
    ("a = 1 or b = 1 and c = 1", {"a": "1"}, True),
    ("(a = 1 or b = 1) and c = 1", {"a": "1", "c": "2"}, False),
    # CONTAINS and its neighbours
    ("a contains 'b'", {"a": "abc"}, True),
    ("a contains 'x'", {"a": "abc"}, False),
    ("a contains 'b'", {}, False),
    ("a not contains 'x'", {"a": "abc"}, True),
    ("a not contains 'b'", {"a": "abc"}, False),
    ("a not contains 'b'", {}, False),
    ("a contains ''", {"a": "abc"}, False),
    ("a not contains ''", {"a": "abc"}, False),
    ("a contains 'it''s'", {"a": "so it's"}, True),
    ("a startswith 'ab'", {"a": "abc"}, True),
    ("a startswith 'bc'", {"a": "abc"}, False),
    ("a not startswith 'bc'", {"a": "abc"}, True),
    ("a StartsWith 'bc'", {}, False),
    ("a endswith 'bc'", {"a": "abc"}, True),
    ("a endswith 'ab'", {"a": "abc"}, False),
    ("a not endswith 'bc'", {"a": "abc"}, False),
    # comments, names
    ("a = 1 -- or b = 2\n and c = 3", {"a": "1", "c": "3"}, True),
    ("a = 1 -- to the end", {"a": "1"}, True),
    ("/* all * of / it **/ a /**/ = /*'*/ 1", {"a": "1"}, True),
    ("$a_1 = 1 AND _b = 2", {"$a_1": "1", "_b": "2"}, True),
    ("a <= now", {"a": "1", "now": "2"}, True),
]

REFUSED: Final[list[tuple[str, str]]] = [
    ("", "character 1: expected a property, a value or a parenthesis, not the end"),
    ("a and between 2 and 10", "character 7: expected a property, a value or a parenthesis, not 'BETWEEN'"),
    (" a between 10 and 0", "character 12: BETWEEN 10 AND 0 is never true; write the smaller bound first"),
    ("a between '10' and '9'", "write the smaller bound first"),
    ("a not between 1.5 and 1.4", "write the smaller bound first"),
    ("a between 1", "expected AND, not the end"),
    ("a > 100000000000000000000000", "character 5: expected a whole number of 64 bits"),
    (f"a > {BIG + 1}", f"at most {BIG}"),
    (f"a > -{BIG + 2}", "64 bits"),
    (f"a > {'1' * 400}.1", "within the range of a double"),
    (f"a > {'1' * 4000}", "64 bits"),
    ("a > 1e999", "within the range of a double"),
    ("a = ", "not the end"),
    ("a = 'x", 'character 5: "\'" begins a text without its closing quote'),
    ("a = 'x''''", "closing quote"),
    ("a = 1 /* x", "comment without its"),
    ("a = 1)", "expected AND, OR or the end, not ')'"),
    ("(a = 1", "expected ), not the end"),
    ("a = NULL", "write IS NULL"),
    ("a is 1", "expected NULL, not '1'"),
    ("a > TRUE", "character 5: expected numbers or properties on both sides of >, not 'TRUE'"),
    ("'x' > a", "character 1: expected numbers or properties on both sides of >, not 'x'"),
    ("a >= 'x'", "numbers or properties"),
    ("a < (b = 1)", "numbers or properties"),
    ("a between 'x' and 3", "both sides of BETWEEN"),
    ("a in ()", "expected a text in quotes after IN, not ')'"),
    ("a in (1, 2)", "text in quotes after IN"),
    ("a in ('1' '2')", "expected ), not '2'"),
    ("'a' in ('a')", "character 1: expected a property before IN, not 'a'"),
    ("a contains b", "text in quotes after CONTAINS"),
    ("5 contains '5'", "expected a property before CONTAINS"),
    ("a = b = c", "expected AND, OR or the end, not '='"),
    ("a not 1", "expected AND, OR or the end, not 'NOT'"),
    ("a == 1", "not '='"),
    ("a != 1", "'!' begins no part of a filter"),
    ("a = 0x10", "not 'x10'"),
    ("- a = 1", "character 3: expected a number, not 'a'"),
    ("1", "1 alone is not a condition"),
    ("'true' and a = 1", "'true' alone is not a condition"),
    ("a = 1 or 2", "2 alone is not a condition"),
    ("a = \x00", "begins no part of a filter"),
    ("ä = 1", "begins no part of a filter"),
    ("(" * (MAX_NESTING + 1) + "a = 1" + ")" * (MAX_NESTING + 1), f"nested deeper than the limit of {MAX_NESTING}"),
    ("(" * MAX_LENGTH, f"limit of {MAX_NESTING}"),
    (" or ".join(["a contains 'x'"] * (MOST_SEARCHES + 1)), f"more than {MOST_SEARCHES} of CONTAINS, STARTSWITH, ENDSWITH"),
    ("a" * (MAX_LENGTH + 1), f"{MAX_LENGTH + 1} characters are over the limit of {MAX_LENGTH}"),
]


@pytest.mark.parametrize(("text", "properties", "expected"), CASES, ids=lambda value: repr(value)[:60])
def test_a_filter_matches_or_not(text: str, properties: Properties, expected: bool) -> None:
    """RD-102: each operator, with values, without, and with such that cannot be compared."""
    assert compile_expression(text)(properties) is expected


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=lambda value: repr(value)[:60])
def test_a_filter_is_refused_with_place_and_reason(text: str, reason: str) -> None:
    """RD-102: what cannot be read, or is over a limit."""
    with pytest.raises(SubscriptionInvalid, match=re.escape(reason)):
        compile_expression(text)


def test_limits_are_reached_without_harm() -> None:
    """RD-102: the deepest and the longest filters that are allowed are read and evaluated."""
    deepest = "(" * MAX_NESTING + "a = 1" + ")" * MAX_NESTING
    assert compile_expression(deepest)({"a": "1"})
    nested = "a = (" * MAX_NESTING + "TRUE" + ")" * MAX_NESTING
    assert compile_expression(nested)({"a": "true"})
    assert compile_expression("not " * 1001 + "a = 1")({"a": "2"})
    longest = " or ".join(["a=1"] * 580)
    assert MAX_LENGTH - 100 < len(longest) <= MAX_LENGTH
    assert not compile_expression(longest)({"a": "2"})


NASTY: Final = [part * (32_000 // len(part)) + end for part in ("1", "1.", "ab", "'", "0") for end in ("", "x", "e")]
WORDY: Final = ("CONTAINS", "STARTSWITH", "ENDSWITH")
PARTS: Final = ("1112", "aab", "x", "2111")
SLOW: Final = ["a > 1", "a = 1", "a = TRUE", "a", *(f"a {word} '{part}'" for word in WORDY for part in PARTS)]


@pytest.mark.parametrize("test", SLOW)
def test_no_property_makes_a_filter_slow(test: str) -> None:
    """RD-102: the longest filter of this kind on the longest properties, the best of five tries."""
    count = min(MOST_SEARCHES if "'" in test else MAX_LENGTH, MAX_LENGTH // (len(test) + len(" AND ")))
    for word in (" OR ", " AND "):
        matches = compile_expression(word.join([test] * count))
        for value in NASTY:
            took = []
            for _ in range(5):
                began = time.thread_time()
                matches({"a": value})
                took.append(time.thread_time() - began)
            assert min(took) < 0.02, (test, word, value[:20])


# -- random filters ---------------------------------------------------------------------------------------------------


class Failure(Exception):
    """A text that is no number met one."""


class Sample(NamedTuple):
    """A filter: how tightly its outermost operator binds (0 OR, 1 AND, 2 NOT, 3 a test), its text, and its meaning.

    Blanks of the text are NUL, so that a test can put others there; its keywords are in upper case.
    """

    level: int
    text: str
    value: Callable[[Properties], bool | None]


NAMES: Final = ["a", "b", "TAGS", "_x$1"]
WORDS: Final = ["", "abc", "bc", "o'clock", "true", "FALSE", "1", "2.50", "-3", "1e2", "01", "NULL"]
NUMBERS: Final[list[float]] = [0, 1, -3, 2.5, 100, BIG, 1e300]

names = st.sampled_from(NAMES)
words = st.sampled_from(WORDS)
numbers = st.sampled_from(NUMBERS)
property_maps = st.dictionaries(names, words)
negations = st.booleans()
orders = st.sampled_from([">", ">=", "<", "<="])
COMPARE: Final = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
SEARCH: Final[dict[str, Callable[[str, str], bool]]] = {
    "CONTAINS": lambda text, part: part in text,
    "STARTSWITH": lambda text, part: text[: len(part)] == part,
    "ENDSWITH": lambda text, part: text[len(text) - len(part) :] == part,
}


def quoted(word: str) -> str:
    return "'" + word.replace("'", "''") + "'"


def number_of(text: str) -> float | None:
    return {"1": 1, "2.50": 2.5, "-3": -3, "1e2": 100, "01": 1}.get(text)


def maybe_not(negated: bool, value: bool | None) -> bool | None:
    return None if value is None else value != negated


def wrapped(sample: Sample, level: int) -> str:
    return sample.text if sample.level >= level else f"(\0{sample.text})"


def equals(name: str, word: str, negated: bool) -> Sample:
    def value(properties: Properties) -> bool | None:
        return maybe_not(negated, properties[name] == word) if name in properties else None

    return Sample(3, f"{name}\0{'<>' if negated else '='}{quoted(word)}", value)


def equals_number(name: str, number: float, negated: bool) -> Sample:
    def value(properties: Properties) -> bool | None:
        if name not in properties:
            return None
        found = number_of(properties[name])
        if found is None:
            raise Failure
        return maybe_not(negated, found == number)

    return Sample(3, f"{number}{'<>' if negated else '='}\0{name}", value)


def ordered(name: str, sign: str, number: float) -> Sample:
    def value(properties: Properties) -> bool | None:
        if name not in properties:
            return None
        found = number_of(properties[name])
        if found is None:
            raise Failure
        return bool(COMPARE[sign](found, number))

    return Sample(3, f"{name}{sign}\0{number}", value)


def ordered_properties(left: str, sign: str, right: str) -> Sample:
    def value(properties: Properties) -> bool | None:
        if left not in properties or right not in properties:
            return None
        first, second = number_of(properties[left]), number_of(properties[right])
        return first is not None and second is not None and COMPARE[sign](first, second)

    return Sample(3, f"{left}\0{sign}{right}", value)


def between(name: str, bounds: list[float], negated: bool) -> Sample:
    low, high = sorted(bounds)

    def value(properties: Properties) -> bool | None:
        if name not in properties:
            return None
        found = number_of(properties[name])
        if found is None:
            raise Failure
        return (low <= found <= high) != negated

    return Sample(3, f"{name}\0{'NOT ' * negated}BETWEEN\0{low}\0AND\0{high}".replace(" ", "\0"), value)


def among(name: str, listed: list[str], negated: bool) -> Sample:
    def value(properties: Properties) -> bool | None:
        return maybe_not(negated, properties[name] in listed) if name in properties else None

    return Sample(3, f"{name}\0{'NOT' * negated}\0IN\0({','.join(map(quoted, listed))}\0)", value)


def search(name: str, verb: str, part: str, negated: bool) -> Sample:
    def value(properties: Properties) -> bool | None:
        if name not in properties:
            return None
        return part != "" and SEARCH[verb](properties[name], part) != negated

    return Sample(3, f"{name}\0{'NOT' * negated}\0{verb}{quoted(part)}", value)


def is_null(name: str, negated: bool) -> Sample:
    return Sample(3, f"{name}\0IS\0{'NOT' * negated}\0NULL", lambda properties: (name in properties) == negated)


def negation(inner: Sample) -> Sample:
    return Sample(2, f"NOT\0{wrapped(inner, 2)}", lambda properties: maybe_not(True, inner.value(properties)))


def chain(parts: list[Sample], conjunction: bool) -> Sample:
    """Kleene: AND is the least, OR the greatest of FALSE < NULL < TRUE; from the left, up to the first that decides."""

    def value(properties: Properties) -> bool | None:
        ranks = []
        for part in parts:
            found = part.value(properties)
            ranks.append(1 if found is None else 2 * found)
            if found is not None and found != conjunction:
                break
        return {0: False, 1: None, 2: True}[min(ranks) if conjunction else max(ranks)]

    level = 1 if conjunction else 0
    word = "\0AND\0" if conjunction else "\0OR\0"
    return Sample(level, word.join(wrapped(part, level + 1) for part in parts), value)


tests = st.one_of(
    st.builds(equals, names, words, negations),
    st.builds(equals_number, names, numbers, negations),
    st.builds(ordered, names, orders, numbers),
    st.builds(ordered_properties, names, orders, names),
    st.builds(between, names, st.lists(numbers, min_size=2, max_size=2), negations),
    st.builds(among, names, st.lists(words, min_size=1, max_size=6), negations),
    st.builds(search, names, st.sampled_from(sorted(SEARCH)), words, negations),
    st.builds(is_null, names, negations),
)
samples = st.recursive(
    tests,
    lambda inner: st.builds(negation, inner) | st.builds(chain, st.lists(inner, min_size=2, max_size=4), st.booleans()),
    max_leaves=12,
)


def dressed(text: str, seed: int) -> str:
    """The same filter with other blanks, comments, and keywords in any case."""
    chance = random.Random(seed)
    pieces = []
    for piece in text.split("\0"):
        keyword = piece.isalpha() and piece not in NAMES
        pieces.append("".join(chance.choice((letter, letter.lower())) for letter in piece) if keyword else piece)
    text = pieces[0]
    for piece in pieces[1:]:
        text += chance.choice((" ", "\t", "\n ", " /* ' ( */", " -- )\r\n", "/***/")) + piece
    return text


@given(samples, property_maps, st.integers(0, 1 << 32))
def test_a_random_filter_means_what_it_says(sample: Sample, properties: Properties, seed: int) -> None:
    """RD-102: rendered with the fewest parentheses, it matches exactly when its direct evaluation is TRUE."""
    try:
        expected = sample.value(properties) is True
    except Failure:
        expected = False
    text = dressed(sample.text, seed)
    assert compile_expression(text)(properties) is expected, text


KEYWORDS: Final = ["NOT", "AND", "OR", "BETWEEN", "IN", "IS", "NULL", "TRUE", "CONTAINS", "STARTSWITH"]
SIGNS: Final = ["(", ")", ",", "=", "<>", ">", "<=", "-", "+", "--", "/*", "*/", "'", "."]
fragments = st.sampled_from([*NAMES, *map(quoted, WORDS), *map(str, NUMBERS), *KEYWORDS, *SIGNS])


@given(st.text(max_size=60) | st.lists(fragments, max_size=20).map(" ".join), property_maps)
@example("\ud800 = 1", {})
@example("a = '\ud800'", {"a": "\udfff"})
def test_garbage_is_a_filter_or_refused(text: str, properties: Properties) -> None:
    """RD-102: no other error, neither when it is read nor when it is evaluated."""
    try:
        matches = compile_expression(text)
    except SubscriptionInvalid as error:
        assert str(error).startswith("SQL92 filter"), text
    else:
        assert matches(properties) in (True, False), text
