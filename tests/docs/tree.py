"""The tree in docs/architecture.md, made from the first line of each module: ``python -m tests.docs.tree`` writes it."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = ROOT / "docs" / "architecture.md"
BEGIN: Final = "```tree\n"
END: Final = "```\n"
WIDTH: Final = 128
COLUMN: Final = 30
"""Where the sentences begin."""


def first_sentence(module: Path) -> str:
    """Return the first sentence of a module's docstring, without its references."""
    text = ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    paragraph = text.split("\n\n")[0].replace("\n", " ").replace("``", "")
    return re.sub(r" \(specs: [^)]*\)", "", re.split(r"(?<=\.) ", paragraph)[0])


def lines(folder: Path, depth: int = 0) -> Iterator[str]:
    """A folder, its modules, and its folders."""
    yield _line(f"{folder.name}/", first_sentence(folder / "__init__.py"), depth)
    for module in sorted(folder.glob("*.py")):
        if module.name != "__init__.py":
            yield _line(module.name, first_sentence(module), depth + 1)
    for inner in sorted(folder.iterdir()):
        if (inner / "__init__.py").is_file():
            yield from lines(inner, depth + 1)


def _line(name: str, sentence: str, depth: int) -> str:
    begin = f"{'  ' * depth}{name}".ljust(COLUMN - 1) + " "
    return textwrap.fill(sentence, WIDTH, initial_indent=begin, subsequent_indent=" " * COLUMN, break_on_hyphens=False)


def tree() -> str:
    """All of metaq."""
    return "".join(f"{line}\n" for line in lines(ROOT / "metaq"))


def written(text: str) -> str:
    """The document with the tree of now."""
    begin = text.index(BEGIN) + len(BEGIN)
    return text[:begin] + tree() + text[text.index(END, begin) :]


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text("utf-8")), "utf-8")
