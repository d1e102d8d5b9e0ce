r"""A reader of the corpus: ``*.wire`` files of bytes that arrive at a reader, and what it must make of them.

Each line of a file begins with a word::

    # what the case is about                    begins a case
    limits max_line_bytes=64 max_body_bytes=16  other limits than the default ones
    send put t 0 5 0 1\r\nhello                 bytes, with the escapes \r \n \t \\ \xNN; several lines make one stream
    send*5000 x                                 the same bytes many times
    event Put("t", 0, 0, -1, None, "1", b"a")   a command or a reply, its fields as Python writes them
    refuse 7 needs TOPIC                        an error after which the stream is in step: opaque, part of the reason
    lose 7 negative                             an error that ends the stream
    held 20                                     this many bytes wait for the rest of their frame; 0 if not given

A blank line means nothing.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from metaq.errors import BadRequest, ProtocolError, StreamLost
from metaq.protocol.text.codec import TextLimits


class Refusal(NamedTuple):
    """An expected error: its class, the opaque that it is answered with, and a part of its reason."""

    error: type[ProtocolError]
    opaque: str
    reason: str


@dataclass(slots=True)
class Case:
    """One stream and what it means; ``name`` is the file's stem and the title."""

    name: str
    data: bytes = b""
    limits: TextLimits = field(default_factory=TextLimits)
    expected: list[object] = field(default_factory=list)
    held: int = 0


class CorpusError(Exception):
    """A corpus file is not written as the module's docstring says."""


def _event(text: str, types: Mapping[str, type]) -> object:
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in types:
        raise CorpusError(f"{text!r} is none of {', '.join(types)}")
    return types[call.func.id](*(ast.literal_eval(argument) for argument in call.args))


def _bytes(text: str) -> bytes:
    return text.encode("latin-1").decode("unicode_escape").encode("latin-1")


def _add(case: Case, word: str, rest: str, types: Mapping[str, type]) -> None:
    verb, _, count = word.partition("*")
    match verb:
        case "send":
            case.data += _bytes(rest) * int(count or 1)
        case "event":
            case.expected.append(_event(rest, types))
        case "refuse" | "lose":
            opaque, _, reason = rest.partition(" ")
            case.expected.append(Refusal(BadRequest if verb == "refuse" else StreamLost, opaque, reason))
        case "held":
            case.held = int(rest)
        case "limits":
            pairs = dict(pair.split("=") for pair in rest.split())
            case.limits = replace(case.limits, **{name: int(value) for name, value in pairs.items()})
        case _:
            raise CorpusError(f"the word {word!r} is unknown")


def read_corpus(folder: Path, types: Mapping[str, type]) -> list[Case]:
    """All cases in a folder; ``types`` are the classes that an ``event`` line may name."""
    cases: list[Case] = []
    for path in sorted(folder.glob("*.wire")):
        first = len(cases)
        for number, line in enumerate(path.read_text("utf-8").split("\n"), start=1):
            word, _, rest = line.partition(" ")
            try:
                if word == "#":
                    cases.append(Case(f"{path.stem}: {rest}"))
                elif word:
                    _add(cases[first:][-1], word, rest, types)
            except (CorpusError, IndexError, TypeError, ValueError, SyntaxError) as error:
                raise CorpusError(f"{path.name}:{number}: {error}") from error
    names = [case.name for case in cases]
    if len(set(names)) != len(names) or not names:
        raise CorpusError(f"{folder} has no cases, or two with the same name")
    return cases
