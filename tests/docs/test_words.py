"""How docstrings begin: with what a function does, not with a question or a number."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from tests.docs.examples import ROOT

QUESTION: Final = re.compile(r"(What|Whether|Who|Whose|Of|As)\b")
ONLY_A_CODE: Final = re.compile(r"(Code )?\d+(,? (and |to )?\d+)*[.:]?")


@cache
def beginnings() -> tuple[tuple[str, str], ...]:
    """Return the place and the first line of each docstring of the package."""
    return tuple(_beginnings())


def _beginnings() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "metaq").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text:
                    yield _place(path, node), text.splitlines()[0]


def _place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def test_no_docstring_begins_with_a_question() -> None:
    """SG-009: a reader looks for what a function does and returns."""
    assert [found for found in beginnings() if QUESTION.match(found[1])] == []


def test_no_docstring_is_only_a_code() -> None:
    """SG-009: nobody knows the numbers of the requests by heart."""
    assert [found for found in beginnings() if ONLY_A_CODE.fullmatch(found[1])] == []
