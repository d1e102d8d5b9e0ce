"""One line of the product that is broken, the test that must fail then, and checks that run neither of them."""

import ast
import functools
import re
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """A row: with ``new`` in the place of ``old`` the test must fail, without it pass."""

    feature: str
    """An ID of ``docs/features.md``, which names the file of the test; or in small letters the part of the project."""
    file: str
    """Relative to ``metaq``."""
    old: str
    """Occurs once in the file; short, so that it stays when what is beside it changes."""
    new: str
    test: str
    """``FILE::TEST`` below ``tests``."""
    waits: bool = False
    """With the mutant the test waits for what never comes: that it takes much longer than without counts as failed."""

    def __str__(self) -> str:
        return f"{self.feature} {self.file}: {self.old!r} -> {self.new!r} [{self.test}]"


def rows_of_features(text: str) -> dict[str, str]:
    """The test file of each feature in the text of ``docs/features.md``; empty where none is named."""
    rows = (line for line in text.splitlines() if re.match(r"\| [A-Z]+-\d+ \|", line))
    cells = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    return {row[0]: row[3].strip("`") for row in cells}


def problem_with(mutant: Mutant, root: Path, tests_of: dict[str, str]) -> str | None:
    """Why a row proves nothing any more, as far as the texts tell; ``None`` when it may."""
    source = (root / "metaq" / mutant.file).read_text("utf-8")
    if (count := source.count(mutant.old)) != 1:
        return f"the old text occurs {count} times: adapt the row"
    try:
        ast.parse(source.replace(mutant.old, mutant.new))
    except SyntaxError as error:
        return f"the new text is no Python: {error}"
    file, _, name = mutant.test.partition("::")
    docstring = docstrings(root / "tests" / file).get(name.partition("[")[0])
    if docstring is None:
        return "there is no such test"
    if not re.match(r"[A-Z]+-", mutant.feature):
        return None
    if tests_of.get(mutant.feature) != file:
        return f"docs/features.md names {tests_of.get(mutant.feature)!r} for the feature"
    return None if re.search(rf"\b{mutant.feature}\b", docstring) else "the docstring of the test does not name the feature"


@functools.cache
def docstrings(file: Path) -> dict[str, str]:
    """Those of the functions in a file, by name; empty where there is none."""
    tree = ast.parse(file.read_bytes()) if file.exists() else ast.Module([], [])
    return {node.name: ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
