"""The API reference says what the docstrings say."""

import ast
from collections.abc import Iterable
from typing import Any, Optional, Union

from tests.docs import api, reference
from tests.docs.examples import fences


def test_the_reference_is_that_of_now() -> None:
    """``python -m tests.docs.reference`` writes it."""
    assert reference.DOCUMENT.read_text("utf-8") == reference.page()


def test_what_it_shows_is_python() -> None:
    """Definitions as in the source, and the examples of classes."""
    shown = [fence for fence in fences("docs/api.md") if fence.kind == "python"]
    assert len(shown) > 150
    for fence in shown:
        ast.parse(fence.text)


def test_every_method_is_on_it() -> None:
    """With its parameters, results and errors."""
    text = reference.DOCUMENT.read_text("utf-8")
    for title in (
        "### connect",
        "### Producer",
        "#### Producer.send",
        "#### Admin.create_topic",
        "### SendFailed",
        "### LagView",
    ):
        assert f"\n{title}\n" in text
    assert "- **retry_after_s**" in text
    assert "- **TooLate**: the message was delivered before." in text


def test_a_docstring_becomes_markdown() -> None:
    """Literals, and a program in a block of its own."""
    text = "A ``b`` c.\n\n::\n\n    with d:\n        e\n\nEnd."
    assert reference.markdown(text) == "A `b` c.\n\n```python\nwith d:\n    e\n```\n\nEnd."


def test_types_are_written_as_in_the_source() -> None:
    """Whatever the version of Python makes of them."""
    old: Any = Iterable[Union[Optional[list[int]], dict[str, int]]]  # noqa: UP007, UP045 - the form that has to be read
    assert api.type_text(old) == "Iterable[list[int] | None | dict[str, int]]"
    assert api.type_text(str | None) == "str | None"
