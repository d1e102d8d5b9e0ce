"""Which cases a test takes of a run whose full count is ``make test-long``: a few, and others for each commit."""

import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SEEDS: Final = 1_000_000


def seed_of_tree() -> int:
    """Return a seed that changes with each commit and is the same on every machine; 0 outside of a repository."""
    if not (ROOT / ".git").exists():
        return 0
    ask = ["git", "rev-parse", "HEAD^{tree}"]
    return int(subprocess.run(ask, cwd=ROOT, check=True, capture_output=True, text=True).stdout[:8], 16) % SEEDS
