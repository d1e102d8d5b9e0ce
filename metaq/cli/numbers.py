"""Whole numbers on the command line, refused in the words of people."""

from typing import Any

import click


class IntRange(click.IntRange):
    """A whole number from a least to a greatest one, if it has these."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or (self.min is not None and number < self.min) or (self.max is not None and number > self.max):
            least = "" if self.min is None else f" from {self.min}"
            most = " on" if self.max is None else f" to {self.max}"
            self.fail(f"{value!r} is not a whole number{least}{most if least else ''}", param, ctx)
        return number
