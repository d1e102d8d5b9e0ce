"""The public API of the Python client: all that programs may use, and their docstrings, taken apart.

``python -m tests.docs.api`` writes the list, tests/client/public_api.txt.
"""

import enum
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import metaq
from metaq.errors import MetaqError

ROOT: Final = Path(__file__).parents[2]
LIST: Final = ROOT / "tests" / "client" / "public_api.txt"

MODULES: Final = {
    "metaq": tuple(metaq.__all__),
    "metaq.aio": tuple(importlib.import_module("metaq.aio").__all__),
    "metaq.testing": tuple(importlib.import_module("metaq.testing").__all__),
    "metaq.client.admin": ("TransactionAdmin", "TimerAdmin", "LeaseAdmin", "ReplicaAdmin", "OffsetExport"),
    "metaq.client.xa": ("connect", "resolve", "Resolved"),
}
"""What programs use: modules, and the names in them. The parts of ``Admin`` are found in modules of their own."""
PARTS_OF_ADMIN: Final = ("transactions", "timers", "leases", "replicas", "offsetexport")
DUNDERS: Final = ("__iter__", "__aiter__")
CONSTRUCTED: Final = ("metaq.TextClient",)
"""Classes that programs call; all others are made by methods."""
SECTION: Final = re.compile(r"^(Args|Returns|Yields|Raises):$")


class Member(NamedTuple):
    """A public function, method, property or attribute."""

    name: str
    """With the module and the class."""
    value: Any

    @property
    def is_function(self) -> bool:
        return inspect.isroutine(self.value)

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.value) or ""

    @property
    def parameters(self) -> list[inspect.Parameter]:
        found = inspect.signature(self.value).parameters.values()
        return [one for one in found if one.name not in {"self", "cls"}]

    @property
    def returns(self) -> object:
        return inspect.signature(self.value).return_annotation


def members_of(kind: type, name: str) -> Iterator[Member]:
    """The public members of a class that metaq itself defines, in the order of their names."""
    for own in sorted(dir(kind)):
        if own.startswith("_") and own not in DUNDERS and not (own == "__init__" and name in CONSTRUCTED):
            continue
        definer = next((base for base in kind.__mro__ if own in vars(base)), None)
        is_of_every_error = issubclass(kind, MetaqError) and definer is not kind
        if definer is not None and definer.__module__.startswith("metaq") and not is_of_every_error:
            found = inspect.getattr_static(kind, own)
            yield Member(f"{name}.{own}", found.__func__ if isinstance(found, classmethod | staticmethod) else found)


def things() -> Iterator[Member]:
    """Public classes and functions, module by module."""
    for module, names in MODULES.items():
        for name in sorted(names):
            found = _found(module, name)
            if not inspect.ismodule(found):
                yield Member(f"{module}.{name}", found)


def _found(module: str, name: str) -> Any:
    if module == "metaq.client.admin":
        places = [importlib.import_module(f"{module}.{part}") for part in PARTS_OF_ADMIN]
        return next(getattr(place, name) for place in places if hasattr(place, name))
    return getattr(importlib.import_module(module), name)


def everything() -> Iterator[Member]:
    """Public classes and functions, and the members of the classes."""
    for thing in things():
        yield thing
        if inspect.isclass(thing.value):
            yield from members_of(thing.value, thing.name)


# -- the list ---------------------------------------------------------------------------------------------------------


def line(member: Member) -> str:
    """Return the line of the list that says what a member is."""
    value = member.value
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        return f"class {member.name}({bases})"
    if isinstance(value, property):
        return f"{member.name} -> {type_text(inspect.signature(value.fget).return_annotation)}" if value.fget else member.name
    if inspect.isroutine(value):
        wait = "async " if inspect.iscoroutinefunction(value) else ""
        return f"{wait}{member.name}{signature_text(value)}"
    return member.name


def listing() -> str:
    """Return the list of all that is public."""
    return "".join(f"{line(member)}\n" for member in everything())


def type_text(annotation: object) -> str:
    """Return a type as a program writes it."""
    text = inspect.formatannotation(annotation)
    return _with_bars(re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", text).replace("~", "").replace("'", ""))


def _with_bars(text: str) -> str:
    """Return a type without Optional and Union, which some versions of Python write where the source has ``|``."""
    while found := re.search(r"\b(Optional|Union)\[", text):
        depth, at, parts, begin = 1, found.end(), [], found.end()
        while depth:
            depth += {"[": 1, "]": -1}.get(text[at], 0)
            if not depth or (depth == 1 and text[at] == ","):
                parts.append(text[begin:at].strip())
                begin = at + 1
            at += 1
        parts = ["None" if part == "NoneType" else part for part in parts]
        parts += ["None"] if found.group(1) == "Optional" else []
        text = text[: found.start()] + " | ".join(parts) + text[at:]
    return text


def signature_text(function: Callable[..., Any]) -> str:
    """Return the parameters and the result of a function; defaults that are not simple values are ``...``."""
    returned = inspect.signature(function).return_annotation
    result = "" if returned is inspect.Signature.empty else f" -> {type_text(returned)}"
    return f"({', '.join(parameter_texts(function))}){result}"


def parameter_texts(function: Callable[..., Any]) -> list[str]:
    """Return the parameters of a function as they are written in its definition."""
    parts: list[str] = []
    seen_star = False
    for one in inspect.signature(function).parameters.values():
        if one.name in {"self", "cls"}:
            continue
        if one.kind is one.KEYWORD_ONLY and not seen_star:
            parts.append("*")
        seen_star = seen_star or one.kind in {one.KEYWORD_ONLY, one.VAR_POSITIONAL}
        stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        typed = "" if one.annotation is one.empty else f": {type_text(one.annotation)}"
        default = "" if one.default is one.empty else f" = {_default(one.default)}"
        parts.append(f"{stars}{one.name}{typed}{default}")
    return parts


def _default(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, str):
        return json.dumps(value)  # in the quotes of the house
    return repr(value) if isinstance(value, bool | int | float | bytes | None | tuple) else "..."


# -- docstrings -------------------------------------------------------------------------------------------------------


class Doc(NamedTuple):
    """A docstring, taken apart."""

    text: str
    """What stands before the sections, and behind them."""
    sections: dict[str, list[tuple[str, str]]]
    """Names and what is said of them, by section; a result has no name."""


def parsed(docstring: str) -> Doc:
    """Take a docstring apart: sections begin with ``Args:`` and the like, and their entries are indented."""
    text: list[str] = []
    sections: dict[str, list[tuple[str, str]]] = {}
    section = ""
    for row in inspect.cleandoc(docstring).splitlines():
        if found := SECTION.match(row):
            section = found.group(1)
            sections[section] = []
        elif section and (row.startswith("    ") or not row):
            _add(sections[section], section, row[4:])
        else:
            section = ""
            text.append(row)
    return Doc("\n".join(text).strip(), sections)


def _add(entries: list[tuple[str, str]], section: str, row: str) -> None:
    begun = re.match(r"(\*{0,2}\w+): (.*)", row) if section in {"Args", "Raises"} else None
    if begun:
        entries.append((begun.group(1).lstrip("*"), begun.group(2)))
    elif row and entries:
        name, said = entries[-1]
        entries[-1] = (name, f"{said} {row.strip()}")
    elif row:
        entries.append(("", row.strip()))


if __name__ == "__main__":
    LIST.write_text(listing(), "utf-8")
