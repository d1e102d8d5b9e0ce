"""Every result names the files that it was measured on, in the history of this repository."""

import json
import subprocess
from typing import Final

import pytest

from benchmarks.tested import AGAIN, ID_LENGTH, REPOSITORY, RESULTS, tree
from metaq.engine import turn
from metaq.form import FORM
from tests.crash.command import Result
from tests.crash.long import HEADER, RUNS, TABLE, row

pytestmark = pytest.mark.partner("git")

TO_BE_RUN_AGAIN: Final[frozenset[str]] = frozenset()
"""The names of results that wait for another run, which takes them out of here."""


def git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def trees() -> dict[str, str]:
    """The tree of each result, by its name."""
    lines = TABLE.read_text("utf-8").removeprefix(HEADER).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    column = [cell.strip() for cell in HEADER.splitlines()[-2].strip("|").split("|")].index("tree")
    found = {cells[0]: cells[column] for cells in rows}
    for path in sorted((REPOSITORY / RESULTS).glob("*.json")):
        machine = json.loads(path.read_text("utf-8"))["machine"]
        found[path.stem] = machine["tree"]
        told = path.with_suffix(".md").read_text("utf-8")
        assert f"| tree | {machine['tree']} |\n| form | {machine['form']} |" in told, path.stem
    return found


def test_every_result_is_of_the_history() -> None:
    """A tree that some commit has, or words that say that it is to be run again; of those the test knows the names."""
    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("needs the whole history: git fetch --unshallow")
    known = {one[:ID_LENGTH] for one in git("log", "--format=%T", "HEAD").split()}
    results = trees()
    assert {name for name, one in results.items() if one == AGAIN} == TO_BE_RUN_AGAIN
    lost = {name: one for name, one in results.items() if one not in known and one != AGAIN}
    assert not lost, f"no commit of the history has these trees: {lost}; run them again"


def test_a_run_writes_its_tree_and_its_form() -> None:
    """In the columns that say so."""
    line = row(RUNS[0], [Result("power", range(1), 5, {"images": 5})], 60.0, tree())
    cells = dict(zip(HEADER.splitlines()[-2].split("|"), line.split("|"), strict=True))
    assert cells[" tree "].strip().startswith(git("rev-parse", "HEAD^{tree}")[:ID_LENGTH])
    assert cells[" form "].strip() == FORM


def test_the_form_is_that_of_the_modules() -> None:
    """One that can be compiled stands for all: they are compiled together."""
    assert ("interpreted" if (turn.__file__ or "").endswith(".py") else "compiled") == FORM
