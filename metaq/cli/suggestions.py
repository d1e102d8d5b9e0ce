"""Suggestions for names that do not exist: the one that a person may have meant."""

import difflib
from collections.abc import Iterable

import click


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean …?`` with the known name that is most like another one; nothing when none is like it."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


class Suggesting(click.Group):
    """Commands, of which the nearest is suggested to who asks for one that does not exist."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            advice = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            ctx.fail(f"No such command {name!r}{advice}")
        return super().resolve_command(ctx, args)
