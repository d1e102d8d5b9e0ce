"""Fields that are set from outside: each kind, its bounds, and all problems at once."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.fields import Problem, WrongFields, declare, declared, from_values, plain


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Part:
    size: int = declare(1, description="how large", ge=1, le=9)


@dataclass(frozen=True, kw_only=True)
class Thing:
    count: int = declare(0, description="how many", ge=0, multiple_of=2)
    share: float = declare(0.5, description="of all", gt=0, le=1)
    on: bool = declare(False, description="whether")
    name: str = declare("", description="what it is called")
    place: Path = declare(Path("here"), description="where it is")
    way: Literal["up", "down"] = declare("up", description="where it goes", live=True)
    colour: Colour = declare(Colour.RED, description="how it looks")
    least: int | None = declare(None, description="unset, or how many at least", ge=0)
    secret: str = declare("", description="what nobody sees", repr=False)
    parts: dict[str, Part] = declare({}, description="its parts")
    codes: dict[str, int] = declare({}, description="numbers in base 16", convert=lambda text: int(text, 16))

    def __post_init__(self) -> None:
        """Raise ``ValueError`` when it goes nowhere."""
        if self.name == "nowhere":
            raise ValueError("it goes nowhere")


def test_text_is_taken_as_the_kind_of_the_field() -> None:
    """MQ-103: flags and environment variables have nothing else."""
    texts = {"count": "4", "share": "1", "on": "yes", "name": "a", "place": "b", "way": "down", "colour": "blue", "least": "0"}
    thing = from_values(Thing, {**texts, "parts": {"p": {"size": "2"}}, "codes": {"x": "ff"}})
    assert thing == Thing(
        count=4,
        share=1.0,
        on=True,
        name="a",
        place=Path("b"),
        way="down",
        colour=Colour.BLUE,
        least=0,
        parts={"p": Part(size=2)},
        codes={"x": 255},
    )
    assert from_values(Thing, plain(thing) | {"codes": {"x": "ff"}}) == thing
    assert from_values(Thing, {}) == Thing()
    assert "hush" not in repr(from_values(Thing, {"secret": "hush"}))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"count": "many"}, "count: must be a whole number"),
        ({"count": 1.5}, "count: must be a whole number"),
        ({"count": True}, "count: must be a whole number"),
        ({"count": "9" * 5000}, "count: must be a whole number"),
        ({"count": -2}, "count: must be at least 0"),
        ({"count": 3}, "count: must be a multiple of 2"),
        ({"count": 1 << 63}, "count: must be at most 9223372036854775807"),
        ({"share": 0}, "share: must be more than 0"),
        ({"share": "2"}, "share: must be at most 1"),
        ({"share": "nan"}, "share: must be a finite number"),
        ({"share": None}, "share: must be a number"),
        ({"on": "perhaps"}, "on: must be true or false"),
        ({"on": 2}, "on: must be true or false"),
        ({"name": 7}, "name: must be text"),
        ({"place": 7}, "place: must be a path"),
        ({"way": "left"}, "way: must be 'up' or 'down'"),
        ({"way": ["up"]}, "way: must be 'up' or 'down'"),
        ({"colour": "green"}, "colour: must be 'red' or 'blue'"),
        ({"least": -1}, "least: must be at least 0"),
        ({"parts": 5}, "parts: must be a list of names and values"),
        ({"parts": {"p": 5}}, "parts.p: must be a list of names and values"),
        ({"parts": {"p": {"size": 10}}}, "parts.p.size: must be at most 9"),
        ({"parts": {"p": {"sizes": 1}}}, "parts.p.sizes: there is no such name"),
        ({"codes": {"x": "g"}}, "codes.x: invalid literal for int() with base 16: 'g'"),
        ({"nothing": 1}, "nothing: there is no such name"),
        ({"name": "nowhere"}, "it goes nowhere"),
    ],
)
def test_what_is_wrong_is_named_with_the_reason(values: dict[str, Any], reason: str) -> None:
    """MQ-103, SG-103."""
    with pytest.raises(WrongFields) as caught:
        from_values(Thing, values)
    assert str(caught.value) == reason


def test_all_problems_are_reported_at_once() -> None:
    """MQ-103: whoever mends a file does not want to start again for each line."""
    with pytest.raises(WrongFields) as caught:
        from_values(Thing, {"count": "x", "parts": {"p": {"size": 0}, "q": {"size": 99}}, "on": "x"})
    assert [problem.place for problem in caught.value.problems] == [
        ("count",),
        ("parts", "p", "size"),
        ("parts", "q", "size"),
        ("on",),
    ]
    assert all(isinstance(problem, Problem) for problem in caught.value.problems)


@given(st.dictionaries(st.sampled_from(sorted(declared(Thing))), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
), max_size=4))  # fmt: skip
def test_whatever_comes_is_taken_or_refused(values: dict[str, Any]) -> None:
    """MQ-103: never any other error; what is taken is taken again as it was."""
    try:
        thing = from_values(Thing, {name: value for name, value in values.items() if name != "codes"})
    except WrongFields as error:
        assert error.problems
    else:
        assert from_values(Thing, plain(thing)) == thing


def test_a_field_says_what_was_declared() -> None:
    """MQ-103: the help and the page of settings are made from it."""
    found = declared(Thing)
    assert [name for name, each in found.items() if each.rules.live] == ["way"]
    assert found["count"] == (int, 0, ("how many", 0, None, None, 2, False, None))
    assert (found["parts"].default, found["place"].annotation) == ({}, Path)
