"""The basis of a result: the tree of the files, and the form in which the broker ran."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[1]
RESULTS: Final = "benchmarks/results"
ID_LENGTH: Final = 12
"""Digits of a tree's id."""
CHANGED: Final = "-changed"
"""Goes on after the id of a tree from which the files differ: a result that nobody can repeat."""
AGAIN: Final = "to be run again"
"""Stands instead of a tree where the history has lost it, or the run has come to prove more since."""


def tree() -> str:
    """The id of the tree of HEAD, whichever commit holds it; results that were written meanwhile are no change."""
    git = shutil.which("git")
    if git is None or not (REPOSITORY / ".git").exists():
        return "unknown"

    def run(*arguments: str) -> str:
        command = [git, "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    changed = run("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS}")
    return run("rev-parse", f"--short={ID_LENGTH}", "HEAD^{tree}") + CHANGED * bool(changed)
