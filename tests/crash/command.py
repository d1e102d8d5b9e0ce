"""The command line of each crash module: one case by its seed, or many."""

import argparse
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

OneCase = Callable[[int], dict[str, int]]


class Violation(AssertionError):
    """The broker broke a promise; the text says which, and how to see it again."""


def expect(condition: bool, text: str, *details: object) -> None:
    """``assert`` that is never optimised away and formats only on failure."""
    if not condition:
        raise Violation(f"{text}: {' '.join(map(repr, details))}")


class Result(NamedTuple):
    """The counts of a run without a violation; a violation raises instead."""

    name: str
    seeds: range
    cases: int
    """Of the kind that the name says."""
    details: dict[str, int]


def run_until(one_case: OneCase, unit: str, seed: int, count: int, name: str) -> Result:
    """Run cases from ``seed`` on until their counts of ``unit`` reach ``count``."""
    details: Counter[str] = Counter()
    following = seed
    while details[unit] < count:
        details.update(one_case(following))
        following += 1
    return Result(name, range(seed, following), details[unit], dict(details))


def main(one_case: OneCase) -> None:
    """``--seed N`` runs the case N, ``--cases M`` that and the M − 1 behind it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1)
    options = parser.parse_args()
    details: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.cases):
        details.update(one_case(seed))
    print(dict(details))
