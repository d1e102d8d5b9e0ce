"""The API reference docs/api.md, made of the docstrings: ``python -m tests.docs.reference`` writes it."""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from metaq.client.admin import views
from metaq.errors import MetaqError
from tests.docs.api import CONSTRUCTED, Member, members_of, parameter_texts, parsed, things, type_text

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "api.md"
WIDTH: Final = 96
INTRODUCTION: Final = """\
# API of the Python client

This page is made of the docstrings of metaq. [clients.md](clients.md) introduces the client with programs that run.
"""


class Chapter(NamedTuple):
    """A part of the page: what it holds of the public API."""

    title: str
    text: str
    module: str


CHAPTERS: Final = (
    Chapter("metaq", "The blocking client. Every name is an attribute of the package.", "metaq"),
    Chapter("metaq.aio", "", "metaq.aio"),
    Chapter("metaq.testing", "", "metaq.testing"),
    Chapter("metaq.client.xa", "XA sessions with brokers that are named directly.", "metaq.client.xa"),
    Chapter("Parts of Admin", "What the methods of `metaq.Admin` return that take further questions.", "metaq.client.admin"),
)


def page() -> str:
    """Return the whole page."""
    chapters = [text for chapter in CHAPTERS for text in _chapter(chapter)]
    return "\n\n".join((INTRODUCTION.strip(), *chapters, *_errors(), *_views())) + "\n"


def _chapter(chapter: Chapter) -> Iterator[str]:
    yield f"## {chapter.title}"
    if chapter.text:
        yield chapter.text
    if chapter.module == "metaq.aio":
        yield from _faces()
        return
    for thing in things():
        where, _, name = thing.name.rpartition(".")
        if where == chapter.module and not _is_error(thing.value):
            yield from _class(thing, name) if inspect.isclass(thing.value) else _function(thing, name, "###")


def _faces() -> Iterator[str]:
    """Only what differs from the blocking classes: the rest has the same parameters and errors, and is awaited."""
    yield (
        "The same names for asyncio. All methods of these classes have the parameters, results and errors of their blocking\n"
        "forms; those that wait are awaited, iterators are for `async for`, and callbacks are coroutine functions."
    )
    rows = ["| class | |", "| --- | --- |"]
    for thing in things():
        where, _, name = thing.name.rpartition(".")
        if where == "metaq.aio" and inspect.isclass(thing.value):
            rows.append(f"| `{name}` | {markdown(thing.doc.split(chr(10) * 2)[0]).replace(chr(10), ' ')} |")
    yield "\n".join(rows)


def _errors() -> Iterator[str]:
    yield "## Errors"
    yield "Each error is `metaq.X`, and stands below its base class. `retriable` says whether the same call may succeed later."
    found = [thing.value for thing in things() if _is_error(thing.value)]
    yield "\n".join(_tree(MetaqError, set(found)))
    for kind in found:
        if own := _attributes(kind):
            yield f"### {kind.__name__}"
            yield "\n".join(f"- **{name}**: {markdown(text)}" for name, text in own.items())


def _tree(kind: type, public: set[type], depth: int = 0) -> Iterator[str]:
    if kind in public:
        yield f"{'  ' * depth}- `{kind.__name__}`: {markdown(_first(kind))}"
        depth += 1
    subclasses: list[type] = kind.__subclasses__()
    for inner in sorted(subclasses, key=lambda one: one.__name__):
        yield from _tree(inner, public, depth)


def _first(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")


def _views() -> Iterator[str]:
    yield "## Views"
    yield "The results of administration; named tuples."
    for name, kind in sorted(vars(views).items()):
        if inspect.isclass(kind) and issubclass(kind, tuple) and kind.__module__ == views.__name__:
            yield from _class(Member(name, kind), name)


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _class(thing: Member, name: str) -> Iterator[str]:
    kind: type = thing.value
    yield f"### {name}"
    yield markdown(thing.doc)
    members = list(members_of(kind, thing.name))
    made = f"{thing.name}" in CONSTRUCTED
    texts = _attributes(kind)
    attributes = [f"- **{own}**{_typed(kind, own)}{_said(text)}" for own, text in texts.items()]
    for member in members:
        own = member.name.rpartition(".")[2]
        if isinstance(member.value, property):
            attributes.append(f"- **{own}**{_said(' '.join(member.doc.split()))}")
    if attributes:
        yield "\n".join(attributes)
    for member in members:
        own = member.name.rpartition(".")[2]
        if member.is_function and (own != "__init__" or made):
            yield from _function(member, name if own == "__init__" else f"{name}.{own}", "####")


def _said(text: str) -> str:
    return f": {markdown(text)}" if text else ""


def _typed(kind: type, own: str) -> str:
    found = getattr(kind, "__annotations__", {}).get(own)
    return "" if found is None or issubclass(kind, Enum) else f" (`{type_text(found)}`)"


def _attributes(kind: type) -> dict[str, str]:
    """The attributes of a class with the text below them, all fields of a named tuple, and all members of an enumeration."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    members = {one.name: str(one.value) for one in kind} if issubclass(kind, Enum) else {}
    fields = members | dict.fromkeys(getattr(kind, "_fields", ()), "")
    making = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    for body in (tree.body, *(node.body for node in making)):
        for node, following in itertools.pairwise(body):
            name = _target(node)
            if name and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                fields[name] = " ".join(str(following.value.value).split())
    return {name: text for name, text in fields.items() if not name.startswith("_")}


def _target(node: ast.stmt) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    if isinstance(target, ast.Name):
        return target.id
    is_own = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    return target.attr if is_own and isinstance(target, ast.Attribute) else ""


def _function(member: Member, title: str, level: str) -> Iterator[str]:
    if not inspect.isroutine(member.value):
        yield f"{level} {title}"
        yield markdown(_constant_text(member))
        return
    doc = parsed(member.doc)
    yield f"{level} {title.replace('__', chr(92) + '_' + chr(92) + '_')}"
    yield f"```python\n{definition(member.value, title.rpartition('.')[2])}\n```"
    yield markdown(doc.text)
    for section, entries in doc.sections.items():
        lines = [f"- **{name}**: {markdown(said)}" if name else markdown(said) for name, said in entries]
        yield f"{section}:\n\n" + "\n".join(lines)


def _constant_text(member: Member) -> str:
    return inspect.getdoc(type(member.value)) or ""


def definition(function: Any, name: str) -> str:
    """Return the head of a function as its source has it, on one line if it fits."""
    returned = inspect.signature(function).return_annotation
    wait = "async " if inspect.iscoroutinefunction(function) else ""
    head, tail = f"{wait}def {name}(", f") -> {type_text(returned)}: ..."
    parts = parameter_texts(function)
    line = f"{head}{', '.join(parts)}{tail}"
    if len(line) <= WIDTH:
        return line
    return "\n".join((head, *(f"    {part}," for part in parts), tail))


def markdown(text: str) -> str:
    """Return a docstring's text as Markdown: its literals, and its example of a program."""
    lines: list[str] = []
    inside = False
    for row in text.splitlines():
        if row.strip() == "::":
            inside = True
            lines.append("```python")
        elif inside and row and not row.startswith("    "):
            _end_block(lines)
            inside = False
            lines.append(row)
        elif inside:
            if row or lines[-1] != "```python":
                lines.append(row[4:])
        else:
            lines.append(row)
    if inside:
        _end_block(lines, last=True)
    return re.sub(r"(?<!`)``(?!`)([^`]+)``(?!`)", r"`\1`", "\n".join(lines))


def _end_block(lines: list[str], *, last: bool = False) -> None:
    while not lines[-1]:
        lines.pop()
    lines.append("```")
    if not last:
        lines.append("")


if __name__ == "__main__":
    DOCUMENT.write_text(page(), "utf-8")
