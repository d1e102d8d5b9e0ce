"""metaq context: addresses and logins of brokers under names, and which of them commands use."""

import os
import re
from pathlib import Path
from typing import Final

import click

from metaq.address import REGISTRY_PORT, Address, parse_address
from metaq.cli.common import (
    BROKER_PORT,
    FAILED,
    PASSWORD_VARIABLE,
    AddressParameter,
    command_login,
    examples,
    json_option,
)
from metaq.cli.contexts import NamedAccess, contexts_file, read_contexts, without, write_contexts
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import Row, print_record, print_rows
from metaq.errors import BadRequest, ConfigError

_NAME: Final = re.compile(r"\w[\w.-]{0,63}")


@click.group(cls=Suggesting)
def context() -> None:
    """Keep addresses and logins under names, so that commands need no options.

    Of the options of a command, the environment and the context in use the first that names an address counts. A context
    that --context or METAQ_CONTEXT names takes the place of the one in use.
    """


def _registry(text: str) -> str:
    """Return the addresses of registries with their ports; what has a scheme is checked when it is used."""
    if "://" in text:
        return text
    try:
        parts = [str(parse_address(part, default_port=REGISTRY_PORT)) for part in re.split("[;,]", text) if part.strip()]
    except BadRequest as error:
        raise click.UsageError(f"--registry {text!r}: {error}") from error
    if not parts:
        raise click.UsageError("--registry is empty; give HOST or HOST:PORT")
    return ";".join(parts)


def _password(file: str | None) -> str:
    """Return the password in a file without its last newline, or that of the environment; empty without both."""
    if file is None:
        return os.environ.get(PASSWORD_VARIABLE, "")
    try:
        with click.open_file(file, "r", encoding="utf-8") as stream:
            password = str(stream.read()).removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"--password-file {file} cannot be read: {reason}") from error
    if not password or "\n" in password:
        raise ConfigError(f"--password-file {file} holds {'several lines' if password else 'nothing'}; it takes one line")
    return password


@context.command(
    epilog=examples(
        "metaq context add prod --registry mq1;mq2 --broker mq1",
        "metaq context add prod --registry mq1 --user ops --password-file ops.secret --tls-ca ca.pem",
    )
)
@click.argument("name")
@click.option("--registry", metavar="HOST:PORT", help="The registry that knows the brokers; separate several with ;.")
@click.option("--broker", type=AddressParameter(BROKER_PORT), help="The broker of commands that talk to one broker.")
@click.option("--user", metavar="NAME", help="The user who logs in.")
@click.option(
    "--password-file",
    metavar="FILE",
    help=f"Keep the password in FILE (- is standard input), or else that in {PASSWORD_VARIABLE}; without both it is asked for.",
)
@click.option(
    "--tls-ca", type=click.Path(path_type=Path), metavar="FILE", help="Use TLS; the certificates to check with (PEM)."
)
@click.option("--replace", "may_replace", is_flag=True, help="Take the place of a context of this name.")
def add(
    name: str,
    registry: str | None,
    broker: Address | None,
    user: str | None,
    password_file: str | None,
    tls_ca: Path | None,
    may_replace: bool,
) -> None:
    """Add a context. Only you can read the file in which it is, with the password."""
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"{name!r} cannot name a context: use at most 64 letters, digits, . _ and -")
    if registry is None and broker is None:
        raise click.UsageError("give --registry or --broker, or both")
    if password_file is not None and user is None:
        raise click.UsageError("--password-file needs --user")
    file = contexts_file()
    contexts = read_contexts(file)
    if name in contexts.by_name and not may_replace:
        raise click.UsageError(f"there is a context {name}; add --replace to put this one in its place")
    fresh = NamedAccess(
        registry="" if registry is None else _registry(registry),
        broker="" if broker is None else str(broker),
        user=user or "",
        password=_password(password_file) if user else "",
        tls_ca="" if tls_ca is None else str(tls_ca.absolute()),
    )
    write_contexts(file, contexts._replace(by_name={**contexts.by_name, name: fresh}))
    click.echo(f"added {name} to {file}")
    if contexts.used != name:
        click.echo(f"metaq context use {name} makes commands use it", err=True)


@context.command(epilog=examples("metaq context use prod", "metaq context use --none"))
@click.argument("name", required=False)
@click.option("--none", "none", is_flag=True, help="Use no context.")
def use(name: str | None, none: bool) -> None:
    """Make commands use a context, until another one is used."""
    if (name is None) != none:
        raise click.UsageError("give either NAME or --none")
    file = contexts_file()
    contexts = read_contexts(file)
    if name is not None:
        contexts.named(name, "context use")
    write_contexts(file, contexts._replace(used=name or ""))
    click.echo(f"commands use {name}" if name else "commands use no context")


@context.command("list", epilog=examples("metaq context list", "metaq context list --json"))
@json_option
def list_contexts(as_json: bool) -> None:
    """List the contexts, without passwords."""
    contexts = read_contexts(contexts_file())
    rows = [{"context": name, "used": name == contexts.used, **_row(one)} for name, one in contexts.by_name.items()]
    print_rows(rows, as_json=as_json)
    if not rows and not as_json:
        click.echo("there are no contexts; metaq context add adds one", err=True)


@context.command(epilog=examples("metaq context show", "metaq context show prod"))
@click.argument("name", required=False)
@json_option
def show(name: str | None, as_json: bool) -> int:
    """Show a context, by default the one that applies now, without its password."""
    if name is None:
        applied = command_login().applied
        if applied is None:
            click.echo("metaq: no context is in use; metaq context list shows those that there are", err=True)
            return FAILED
        name, one = applied.name, applied.context
    else:
        one = read_contexts(contexts_file()).named(name, "context show")
    print_record({"context": name, **_row(one)}, as_json=as_json)
    return 0


def _row(one: NamedAccess) -> Row:
    kept = "kept" if one.password else "asked for" if one.user else ""
    return {"registry": one.registry, "broker": one.broker, "user": one.user, "password": kept, "tls_ca": one.tls_ca}


@context.command(epilog=examples("metaq context remove prod"))
@click.argument("name")
def remove(name: str) -> None:
    """Remove a context."""
    file = contexts_file()
    contexts = read_contexts(file)
    contexts.named(name, "context remove")
    write_contexts(file, without(contexts, name))
    used = "; no context is in use now" if contexts.used == name else ""
    click.echo(f"removed {name}{used}")
