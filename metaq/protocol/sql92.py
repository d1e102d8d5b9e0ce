"""SQL92 filters on the properties of a message (specs: remoting protocol, section 5.1).

::

    condition   = conjunction { OR conjunction }
    conjunction = negation { AND negation }
    negation    = { NOT } test
    test        = operand [ comparison | IS [NOT] NULL | [NOT] BETWEEN operand AND operand
                          | [NOT] IN '(' text { ',' text } ')' | [NOT] (CONTAINS|STARTSWITH|ENDSWITH) text ]
    comparison  = ( = | <> | > | >= | < | <= ) operand
    operand     = property | text | [+|-] number | TRUE | FALSE | '(' condition ')'

Keywords ignore case, property names do not. Strings (``text``) stand in single quotes, a quote in them is doubled. ``--``
begins a comment that ends with the line, ``/*`` one that ends at ``*/``.

- Properties are strings, a missing one is NULL. NULL in a test makes it unknown; NOT, AND and OR follow three-valued logic.
  Only TRUE matches.
- A string compared with a number is converted. When it is not a number, or has more than 512 characters, the message does not
  match, whatever the rest of the filter says.
- A string compared with TRUE or FALSE, or one that stands alone as a condition, is true when it reads ``true`` in any case.
- Two strings are equal when their characters are. ``<`` and the like compare them as numbers, and are FALSE when one of them
  is not a number.
- With an empty string, CONTAINS, STARTSWITH and ENDSWITH are FALSE, and so are NOT CONTAINS, NOT STARTSWITH and NOT ENDSWITH.

NOT binds weaker than comparisons, as in standard SQL. In RocketMQ's parser it binds tighter, so ``NOT a = 1`` never matches
there; with parentheses both agree.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, NoReturn

from metaq.errors import SubscriptionInvalid

MAX_LENGTH: Final = 1 << 12
"""Characters of a filter: that many take up to 10 ms to parse, and as long to evaluate on the longest properties."""
MOST_SEARCHES: Final = 64
"""CONTAINS, STARTSWITH and ENDSWITH in one filter: each takes up to 0.1 ms."""
LONGEST_NUMBER: Final = 512
"""Characters of a string that is a number: no double needs more, however small it is."""
MAX_NESTING: Final = 32
"""Parentheses within parentheses: each uses some stack, both in parsing and in evaluation."""
MAX_WHOLE: Final = (1 << 63) - 1

Properties = Mapping[str, str]
Value = str | int | float | bool | None
Read = Callable[[Properties], Value]
Test = Callable[[Properties], bool | None]

_TOKEN: Final = re.compile(
    r"""(?P<blank>(?:[ \t\n\r\f]|--[^\n\r]*|/\*.*?\*/)+)
    |(?P<text>'[^']*(?:''[^']*)*')
    |(?P<decimal>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)
    |(?P<whole>[0-9]+)[lL]?
    |(?P<word>[A-Za-z_$][A-Za-z0-9_$]*)
    |(?P<sign><>|>=|<=|[=<>(),+-])""",
    re.VERBOSE | re.DOTALL,
)
_KEYWORDS: Final = frozenset(
    ("NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH", "ENDSWITH")
)
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,19}")
_ORDERS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_SEARCHES: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


class _NotComparable(Exception):
    """A string that is not a number was compared with one: the message does not match."""


def compile_expression(text: str) -> Callable[[Properties], bool]:
    """Return a function that says whether a message with the given properties matches; it never raises.

    ``SubscriptionInvalid`` names the place in ``text`` and what is wrong there, or the limit that ``text`` exceeds.
    """
    if len(text) > MAX_LENGTH:
        raise SubscriptionInvalid(f"SQL92 filter: {len(text)} characters are over the limit of {MAX_LENGTH}")
    test = _Parser(text).parse()

    def matches(properties: Properties) -> bool:
        try:
            return test(properties) is True
        except _NotComparable:
            return False

    return matches


# -- evaluation -------------------------------------------------------------------------------------------------------


def _number(text: str) -> int | float | None:
    """Return the number that a string is, ``None`` when it is not one.

    Integers of up to 19 digits are exact. A number beyond the range of a double counts as none.
    """
    if _WHOLE.fullmatch(text):
        return int(text)
    if len(text) > LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def _meeting(value: Value, other: Value) -> Value:
    """Return ``value`` converted for a comparison with ``other``; at most one of the two is a string."""
    if not isinstance(value, str):
        return value
    if isinstance(other, bool):
        return _is_true(value)
    number = _number(value)
    if number is None:
        raise _NotComparable
    return number


def _is_true(text: str) -> bool:
    return len(text) == 4 and text.lower() == "true"  # the length first: long strings are not copied


def _equal(left: Value, right: Value) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    left, right = _meeting(left, right), _meeting(right, left)
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _ordered(left: Value, right: Value, compare: Callable[[float, float], bool]) -> bool | None:
    """Return whether ``compare`` holds, ``None`` when a side is missing. The parser allows only properties and numbers here."""
    if left is None or right is None:
        return None
    first, second = (_number(side) if isinstance(side, str) else side for side in (left, right))
    if first is not None and second is not None:
        return compare(first, second)
    if isinstance(left, str) and isinstance(right, str):
        return False
    raise _NotComparable


def _equality(left: Read, right: Read) -> Test:
    return lambda properties: _equal(left(properties), right(properties))


def _order(left: Read, right: Read, compare: Callable[[float, float], bool]) -> Test:
    return lambda properties: _ordered(left(properties), right(properties), compare)


def _not(test: Test) -> Test:
    def evaluate(properties: Properties) -> bool | None:
        value = test(properties)
        return None if value is None else not value

    return evaluate


def _all_of(tests: list[Test], decisive: bool) -> Test:
    """Return AND (``decisive`` is False) or OR (``decisive`` is True). Tests after a decisive one are not evaluated."""

    def evaluate(properties: Properties) -> bool | None:
        unknown = False
        for test in tests:
            value = test(properties)
            if value is decisive:
                return decisive
            unknown = unknown or value is None
        return None if unknown else not decisive

    return evaluate


# -- parsing ----------------------------------------------------------------------------------------------------------


class _Token(NamedTuple):
    kind: str
    """``text``, ``decimal``, ``whole``, ``word``, ``sign``, ``keyword`` or ``end``."""
    text: str
    """A string without its quotes, a keyword in upper case, anything else as written."""
    at: int


class _Operand(NamedTuple):
    """A part of a filter with a value: a property (``name``), a literal (``fixed``), or a condition (``test``)."""

    read: Read
    fixed: Value = None
    test: Test | None = None
    name: str | None = None


def _literal(value: str | int | float | bool) -> _Operand:
    return _Operand(lambda _: value, fixed=value)


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            what = {"'": "a text without its closing quote", "/": "a comment without its */"}.get(
                text[at], "no part of a filter"
            )
            raise SubscriptionInvalid(f"SQL92 filter, character {at + 1}: {text[at]!r} begins {what}")
        kind = match.lastgroup or ""
        word = match[kind]
        if kind == "text":
            word = word[1:-1].replace("''", "'")
        elif kind == "word" and word.upper() in _KEYWORDS:
            kind, word = "keyword", word.upper()
        if kind != "blank":
            tokens.append(_Token(kind, word, at))
        at = match.end()
    tokens.append(_Token("end", "", at))
    return tokens


class _Parser:
    """A recursive-descent parser; only parentheses recurse."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = 0
        self._nesting = 0
        self._searches = 0

    def parse(self) -> Test:
        condition = self._condition()
        if self._token.kind != "end":
            self._refuse("expected AND, OR or the end")
        return self._test_of(condition)

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _refuse(self, reason: str, token: _Token | None = None) -> NoReturn:
        kind, text, at = token or self._token
        found = "the end" if kind == "end" else repr(text[:32])
        raise SubscriptionInvalid(f"SQL92 filter, character {at + 1}: {reason}, not {found}")

    def _took(self, kind: str, *texts: str) -> str | None:
        """Consume the next token and return its text when it is of this kind and one of ``texts`` (any when none is given)."""
        token = self._token
        if token.kind != kind or (texts and token.text not in texts):
            return None
        self._next += 1
        return token.text

    def _need(self, kind: str, text: str) -> None:
        if self._took(kind, text) is None:
            self._refuse(f"expected {text}")

    def _test_of(self, operand: _Operand) -> Test:
        """Return the test of an operand that stands as a condition; ``SubscriptionInvalid`` when it cannot be one."""
        if operand.test is not None:
            return operand.test
        if isinstance(operand.fixed, bool):
            fixed = operand.fixed
            return lambda _: fixed
        name = operand.name
        if name is None:
            raise SubscriptionInvalid(f"SQL92 filter: {operand.fixed!r} alone is not a condition; compare it with something")
        return lambda properties: _is_true(properties[name]) if name in properties else None

    def _condition(self) -> _Operand:
        return self._chain("OR", self._conjunction)

    def _conjunction(self) -> _Operand:
        return self._chain("AND", self._negation)

    def _chain(self, word: str, part: Callable[[], _Operand]) -> _Operand:
        first = part()
        if self._token[:2] != ("keyword", word):
            return first
        tests = [self._test_of(first)]
        while self._took("keyword", word):
            tests.append(self._test_of(part()))
        return _condition(_all_of(tests, decisive=word == "OR"))

    def _negation(self) -> _Operand:
        negations = 0
        while self._took("keyword", "NOT"):
            negations += 1
        operand = self._test()
        if not negations:
            return operand
        test = self._test_of(operand)
        return _condition(_not(test) if negations % 2 else test)

    def _test(self) -> _Operand:
        start = self._token
        left = self._operand()
        sign = self._took("sign", "=", "<>", *_ORDERS)
        if sign:
            return _condition(self._comparison(left, start, sign))
        if self._took("keyword", "IS"):
            negated = self._took("keyword", "NOT") is not None
            self._need("keyword", "NULL")
            read = left.read
            return _condition(lambda properties: (read(properties) is None) is not negated)
        at = self._next
        negated = self._took("keyword", "NOT") is not None
        word = self._took("keyword", "BETWEEN", "IN", *_SEARCHES)
        if word is None:
            self._next = at
            return left
        if word == "BETWEEN":
            return _condition(self._between(left, start, negated))
        if left.name is None:
            self._refuse(f"expected a property before {word}", start)
        return _condition(self._among(left.read, negated) if word == "IN" else self._search(left.read, word, negated))

    def _operand(self) -> _Operand:
        token = self._token
        if self._took("word"):
            name = token.text
            return _Operand(lambda properties: properties.get(name), name=name)
        if self._took("text") is not None:
            return _literal(token.text)
        if self._took("keyword", "TRUE", "FALSE"):
            return _literal(token.text == "TRUE")
        if self._took("sign", "("):
            return self._parenthesis(token)
        if token[:2] == ("keyword", "NULL"):
            self._refuse("expected a value (to test for a missing property, write IS NULL)")
        sign = self._took("sign", "+", "-")
        number = self._token
        if self._took("whole") is None and self._took("decimal") is None:
            self._refuse("expected a number" if sign else "expected a property, a value or a parenthesis")
        return _literal(self._fixed_number(sign or "", number))

    def _parenthesis(self, opening: _Token) -> _Operand:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            reason = f"parentheses are nested deeper than the limit of {MAX_NESTING}"
            raise SubscriptionInvalid(f"SQL92 filter, character {opening.at + 1}: {reason}")
        operand = self._condition()
        self._need("sign", ")")
        self._nesting -= 1
        return operand

    def _fixed_number(self, sign: str, token: _Token) -> int | float:
        if token.kind == "decimal":
            number = float(sign + token.text)
            if math.isinf(number):
                self._refuse("expected a number within the range of a double", token)
            return number
        digits = token.text.lstrip("0") or "0"
        if len(digits) > 19 or int(digits) > MAX_WHOLE + (sign == "-"):
            self._refuse(f"expected a whole number of 64 bits, at most {MAX_WHOLE}", token)
        return int(sign + digits)

    def _comparison(self, left: _Operand, start: _Token, sign: str) -> Test:
        right_start = self._token
        right = self._operand()
        if sign in _ORDERS:
            first = self._orderable(left, start, sign)
            return _order(first, self._orderable(right, right_start, sign), _ORDERS[sign])
        equality = _equality(left.read, right.read)
        return equality if sign == "=" else _not(equality)

    def _orderable(self, operand: _Operand, start: _Token, word: str) -> Read:
        """Return the reader of an operand that has an order: a property, a number, or a string that is a number."""
        fixed = operand.fixed
        if isinstance(fixed, str):
            number = _number(fixed)
            if number is not None:
                return lambda _: number
        if operand.name is None and (isinstance(fixed, bool | str) or operand.test is not None):
            self._refuse(f"expected numbers or properties on both sides of {word}", start)
        return operand.read

    def _between(self, operand: _Operand, start: _Token, negated: bool) -> Test:
        low_start = self._token
        low = self._operand()
        self._need("keyword", "AND")
        high_start = self._token
        high = self._operand()
        value = self._orderable(operand, start, "BETWEEN")
        first = self._orderable(low, low_start, "BETWEEN")
        last = self._orderable(high, high_start, "BETWEEN")
        if low.name is None and high.name is None and _ordered(first({}), last({}), operator.gt):
            reason = f"BETWEEN {low.fixed} AND {high.fixed} is never true; write the smaller bound first"
            raise SubscriptionInvalid(f"SQL92 filter, character {low_start.at + 1}: {reason}")
        if negated:
            return _all_of([_order(value, first, operator.lt), _order(value, last, operator.gt)], decisive=True)
        return _all_of([_order(value, first, operator.ge), _order(value, last, operator.le)], decisive=False)

    def _among(self, read: Read, negated: bool) -> Test:
        self._need("sign", "(")
        texts = {self._text("IN")}
        while self._took("sign", ","):
            texts.add(self._text("IN"))
        self._need("sign", ")")

        def among(properties: Properties) -> bool | None:
            value = read(properties)
            return None if value is None else (value in texts) is not negated

        return among

    def _search(self, read: Read, word: str, negated: bool) -> Test:
        self._searches += 1
        if self._searches > MOST_SEARCHES:
            raise SubscriptionInvalid(
                f"SQL92 filter: it has more than {MOST_SEARCHES} of {', '.join(_SEARCHES)}, which is the limit"
            )
        part = self._text(word)
        found = _SEARCHES[word]

        def search(properties: Properties) -> bool | None:
            value = read(properties)
            return None if value is None else bool(part) and found(str(value), part) is not negated

        return search

    def _text(self, word: str) -> str:
        text = self._took("text")
        if text is None:
            self._refuse(f"expected a text in quotes after {word}")
        return text


def _condition(test: Test) -> _Operand:
    return _Operand(test, test=test)
