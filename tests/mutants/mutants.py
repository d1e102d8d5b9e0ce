"""The rows, as a run of the crash proof: ``python -m tests.mutants [--check] [--only FEATURE] [--sample N --seed S]``."""

import argparse
import random
import tempfile
from pathlib import Path

from tests.crash.command import Result
from tests.mutants.mutant import ROOT, Mutant, problem_with, rows_of_features
from tests.mutants.rows import MUTANTS
from tests.mutants.runner import judge_all
from tests.support.samples import seed_of_tree


def check() -> list[str]:
    """Return what is wrong with the rows, as far as the texts show it."""
    tests_of = rows_of_features((ROOT / "docs" / "features.md").read_text("utf-8"))
    found = ((mutant, problem_with(mutant, ROOT, tests_of)) for mutant in MUTANTS)
    return [f"{mutant}: {problem}" for mutant, problem in found if problem is not None]


def sample(seed: int, count: int) -> list[Mutant]:
    """So many different rows, but none whose test waits; all, in their order, when so many are wanted."""
    quick = [mutant for mutant in MUTANTS if not mutant.waits]
    return MUTANTS if count >= len(MUTANTS) else random.Random(seed).sample(quick, min(count, len(quick)))


def run(seed: int, count: int) -> Result:
    """Judge so many rows, at most all; ``MutantSurvived``."""
    chosen = sample(seed, count)
    with tempfile.TemporaryDirectory() as folder:
        counts = judge_all(chosen, Path(folder), tell=True)
    return Result("mutants", range(seed, seed + 1), len(chosen), dict(counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only whether each row's old text still occurs once, and the like")
    parser.add_argument("--only", help="rows of this feature")
    parser.add_argument("--sample", type=int, help="so many rows instead of all")
    parser.add_argument("--seed", type=int, default=seed_of_tree(), help="of the sample; else the tree's")
    options = parser.parse_args()
    problems = check()
    if problems:
        raise SystemExit("\n".join(problems))
    if options.check:
        print(f"{len(MUTANTS)} rows")
    elif options.only:
        with tempfile.TemporaryDirectory() as folder:
            judge_all([mutant for mutant in MUTANTS if mutant.feature == options.only], Path(folder), tell=True)
    else:
        print(run(options.seed, options.sample or len(MUTANTS)))
