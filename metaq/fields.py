"""Fields of frozen dataclasses that are set from outside: what each takes, checked and converted with all problems at once.

A field's annotation is one of int, float, bool, str, Path, a Literal of words, an enum of words, one of these or ``None``, or a
dict of other such dataclasses by name. Values come from YAML, or as text from flags and environment variables. A field whose
name ends in a unit (``metaq.quantities``) takes sizes and lengths of time as people write them, too: 1G, 3d.
"""

import enum
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from metaq.quantities import MOST, Unit, shorten, unit_of

T = TypeVar("T")

_RULES: Final = "rules"
_NO: Final = frozenset(("false", "0", "no", "off", "n", "f"))
_YES: Final = frozenset(("true", "1", "yes", "on", "y", "t"))
_MOST_DIGITS: Final = 400
"""Characters of a number that are converted."""


class Rules(NamedTuple):
    """The purpose of a field, and the bounds of its value."""

    description: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    multiple_of: int | None = None
    live: bool = False
    """True when the value can change while the process runs."""
    convert: Callable[[Any], Any] | None = None
    """Converts a value, or each entry of a dict; raises ``ValueError``. For kinds that this module does not know."""


class Declared(NamedTuple):
    """A field as it was declared."""

    annotation: Any
    default: Any
    rules: Rules


class Problem(NamedTuple):
    """The reason why one value is refused, and the names that lead to it; none for the values as a whole."""

    place: tuple[str, ...]
    reason: str


class Given(NamedTuple):
    """A value, and where it was set."""

    value: Any
    origin: str
    """``FILE:LINE``, ``METAQ_NAME`` or ``--name``."""


class WrongFields(Exception):
    """Values that are refused."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(": ".join(filter(None, (".".join(place), reason))) for place, reason in problems))
        self.problems = problems


def declare(
    default: Any,
    *,
    description: str,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    multiple_of: int | None = None,
    live: bool = False,
    convert: Callable[[Any], Any] | None = None,
    repr: bool = True,
) -> Any:
    """Return a field of a frozen dataclass, as ``dataclasses.field`` does; without ``repr`` it is never shown."""
    rules = {_RULES: Rules(description, ge, gt, le, multiple_of, live, convert)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=rules, repr=repr)
    return field(default=default, metadata=rules, repr=repr)


def declared(kind: type[Any]) -> Mapping[str, Declared]:
    """Return the fields of a class by name, in their order."""
    hints, known = get_type_hints(kind), fields(kind)
    return {each.name: Declared(hints[each.name], _default(each), each.metadata[_RULES]) for each in known}


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def from_values(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return an object of the class with these values, and the defaults of the others.

    Raise ``WrongFields`` with all values that are wrong, or with the ``ValueError`` of the class's own ``__post_init__``.
    """
    problems: list[Problem] = []
    converted = dict(_converted(kind, values, problems))
    if problems:
        raise WrongFields(problems)
    try:
        return kind(**converted)
    except ValueError as error:
        raise WrongFields([Problem((), str(error))]) from error


def _converted(kind: type[Any], values: Mapping[str, Any], problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    """Yield the values by name, as their fields take them; add what is wrong to ``problems``."""
    known = declared(kind)
    for name, value in values.items():
        if name not in known:
            problems.append(Problem((name,), "there is no such name"))
            continue
        try:
            yield name, _value(known[name].annotation, value, known[name].rules, unit_of(name))
        except WrongFields as error:
            problems += [Problem((name, *place), reason) for place, reason in error.problems]
        except ValueError as error:
            problems.append(Problem((name,), str(error)))


def _value(annotation: Any, value: Any, rules: Rules, unit: Unit | None) -> Any:
    """Return a value as a field takes it; ``ValueError`` says what the input should be."""
    if isinstance(annotation, types.UnionType):  # one kind, or None
        (annotation,) = (kind for kind in get_args(annotation) if kind is not types.NoneType)
        if value is None:
            return None
    origin = get_origin(annotation)
    if origin is dict:
        kind = get_args(annotation)[1]
        return _entries(partial(_object, kind) if rules.convert is None else rules.convert, value)
    if origin is Literal:
        return _word(get_args(annotation), value)
    if issubclass(annotation, enum.Enum):
        return annotation(_word([member.value for member in annotation], value))
    if unit is not None and annotation in {int, float}:
        return _measured(unit, annotation, value, rules)
    return _within(rules, _KINDS[annotation](value))


def _object(kind: type[Any], value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("must be a list of names and values")
    return from_values(kind, value)


def _entries(convert: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("must be a list of names and values")
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, entry in value.items():
        try:
            found[str(name)] = convert(entry)
        except WrongFields as error:
            problems += [Problem((str(name), *place), reason) for place, reason in error.problems]
        except ValueError as error:
            problems.append(Problem((str(name),), str(error)))
    if problems:
        raise WrongFields(problems)
    return found


def _word(words: Any, value: Any) -> Any:
    if value not in words:
        *others, last = (f"'{word}'" for word in words)
        raise ValueError(f"must be {', '.join(others)} or {last}")
    return str(value)


def _within(rules: Rules, value: Any, said: str = "", write: Callable[[Any], str] = str) -> Any:
    """Return a value that keeps the rules; ``said`` begins the sentence about one that does not, ``write`` writes its bound."""
    most = MOST if rules.le is None else min(rules.le, MOST)
    for is_wrong, relation, bound in (
        (rules.ge is not None and value < rules.ge, "must be at least", rules.ge),
        (rules.gt is not None and value <= rules.gt, "must be more than", rules.gt),
        (isinstance(value, int | float) and value > most, "must be at most", most),
        (rules.multiple_of is not None and value % rules.multiple_of, "must be a multiple of", rules.multiple_of),
    ):
        if is_wrong:
            raise ValueError(f"{said}{relation} {write(bound)}")
    return value


def _measured(unit: Unit, kind: type[int] | type[float], value: Any, rules: Rules) -> Any:
    """Return a size or a length of time, which is a plain number in its unit, or text with a unit."""
    try:
        number = _KINDS[kind](value)
    except ValueError:
        if not isinstance(value, str):
            raise ValueError(f"{shorten(value)} is no {unit.noun}; write {unit.form}") from None
        exact = unit.parse(value.strip())
        if kind is int and exact.denominator != 1:
            raise ValueError(f"{shorten(value)} is not a whole number; write {unit.form}") from None
        number = kind(exact)
    return _within(rules, number, f"{shorten(value)} ", unit.write)


def _integer(value: Any) -> int:
    if (isinstance(value, str) and len(value) <= _MOST_DIGITS) or (isinstance(value, float) and value.is_integer()):
        try:
            return int(value)
        except ValueError:
            pass
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("must be a whole number")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or len(str(value)) > _MOST_DIGITS:
        raise ValueError("must be a number")
    try:
        found = float(value)
    except (ValueError, OverflowError):
        raise ValueError("must be a number") from None
    if not math.isfinite(found):
        raise ValueError("must be a finite number")
    return found


def _truth(value: Any) -> bool:
    text = str(value).lower()
    if not isinstance(value, bool | int | str) or text not in _YES | _NO:
        raise ValueError("must be true or false")
    return text in _YES


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError("must be a path")
    return Path(value)


_KINDS: Final[Mapping[Any, Callable[[Any], Any]]] = {int: _integer, float: _number, bool: _truth, str: _text, Path: _path}


def plain(thing: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of an object by name, as JSON and YAML have them; ``without`` are names to leave out."""
    return {name: _plain(getattr(thing, name)) for name in declared(type(thing)) if name not in without}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if is_dataclass(value):
        return plain(value)
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
