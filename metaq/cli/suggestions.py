"""Groups of commands that suggest what a person may have meant."""

from typing import Any, Final

import click

from metaq.suggestions import did_you_mean

_ELSEWHERE: Final = {
    "--registry": "this command talks to one broker, --broker HOST; metaq message is for all brokers of a registry",
    "--broker": "this command finds all brokers, --registry HOST; metaq put, get and tail talk to one",
    "--context": "it stands before the command: metaq --context NAME {command}",
    "--user": "it stands before the command: metaq --user NAME {command}",
    "--users-file": "it stands before the command: metaq --users-file FILE {command}",
    "--tls-ca": "it stands before the command: metaq --tls-ca FILE {command}",
    "--json": "it stands after the command: metaq topic list --json",
}
"""Options that people look for at commands that do not have them."""


class Suggesting(click.Group):
    """Commands, of which the nearest is suggested to who asks for one that does not exist."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            advice = did_you_mean(name, self.list_commands(ctx)) or f"; {ctx.command_path} --help shows those that there are"
            ctx.fail(f"No such command {name!r}{advice}")
        return super().resolve_command(ctx, args)

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        """Make it as click does; an option that another command takes is refused with where it belongs."""
        try:
            return super().make_context(*arguments, **extra)
        except click.NoSuchOption as error:
            raise _explained(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _explained(error) from None


def _explained(error: click.NoSuchOption) -> click.UsageError:
    if error.option_name not in _ELSEWHERE or error.ctx is None:
        return error
    path = error.ctx.command_path.partition(" ")[2]
    return click.UsageError(
        f"No such option {error.option_name!r}: {_ELSEWHERE[error.option_name].format(command=path)}", error.ctx
    )
