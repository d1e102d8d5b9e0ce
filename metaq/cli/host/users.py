"""``metaq user``: the users file of a broker or registry on this machine."""

import os
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click

from metaq.cli.common import FAILED, PASSWORD_VARIABLE, Decorated, examples, json_option
from metaq.cli.suggestions import Suggesting
from metaq.cli.tables import Row, print_rows
from metaq.errors import ConfigError
from metaq.fields import WrongFields, from_values
from metaq.server.access.permissions import ANONYMOUS, Permission
from metaq.server.access.users import (
    LEAST_SECRET,
    MOST_PASSWORD,
    User,
    hashed,
    is_name,
    parse_permission,
    written_permission,
)
from metaq.server.access.usersfile import editing, load_users


@click.group(cls=Suggesting)
def user() -> None:
    """Add, remove and list users, and set their permissions.

    These commands edit the file that the setting users_file names. Brokers and registries notice changes by themselves.
    """


def file_option(command: Decorated) -> Decorated:
    """Add ``--file``."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option(
        "--file",
        type=path,
        required=True,
        envvar="METAQ_USERS_FILE",
        show_envvar=True,
        help="The users file; created if missing.",
    )(command)


@user.command(
    epilog=examples(
        "metaq user add billing --file users.yaml --generate",
        "metaq user add root --file users.yaml --admin",
        "metaq user add ann --file users.yaml --hash     # text protocol and HTTP only",
    )
)
@click.argument("name")
@click.option("--admin", is_flag=True, help="Allow everything.")
@click.option("--hash", "as_hash", is_flag=True, help="Store only a hash; such a user cannot sign requests.")
@click.option("--generate", is_flag=True, help="Generate the password, and print it.")
@file_option
def add(name: str, admin: bool, as_hash: bool, generate: bool, file: Path) -> None:
    """Add a user, or change a user's password; permissions stay.

    The password is read from METAQ_PASSWORD, or asked for.
    """
    if not is_name(name) or name == ANONYMOUS:
        raise ConfigError(f"{name!r} cannot be a user's name: use at most 64 letters, digits, . _ and -, and not {ANONYMOUS}")
    password = secrets.token_urlsafe(24) if generate else os.environ.get(PASSWORD_VARIABLE) or _asked(name)
    if not LEAST_SECRET <= len(password) <= MOST_PASSWORD:
        raise ConfigError(f"{name}: a password must have {LEAST_SECRET} to {MOST_PASSWORD} characters, not {len(password)}")
    if not password.isprintable() or " " in password or not password.isascii():
        raise ConfigError(f"{name}: a password may only have printable ASCII characters without blanks")
    proof = {"password": hashed(password)} if as_hash else {"secret": password}
    with editing(file) as users:
        before = users.get(name, User())
        rest = {"topics": before.topics, "groups": before.groups, "admin": admin or before.admin}
        users[name] = _made(name, {**rest, **proof})
    if generate:
        click.echo(password)


def _asked(name: str) -> str:
    return str(click.prompt(f"Password of {name}", hide_input=True, confirmation_prompt=True, err=True))


def _made(name: str, row: dict[str, object]) -> User:
    try:
        return from_values(User, row)
    except WrongFields as error:
        raise ConfigError(f"{name}: {error}") from None


@user.command(epilog=examples("metaq user remove billing --file users.yaml"))
@click.argument("name")
@file_option
def remove(name: str, file: Path) -> int:
    """Remove a user. From then on the user has no permissions."""
    with editing(file) as users:
        if users.pop(name, None) is None:
            click.echo(f"metaq: there is no user {name} in {file}", err=True)
            return FAILED
    return 0


@user.command(
    epilog=examples(
        "metaq user permit billing --topic orders=SUB --group billing=SUB --file users.yaml",
        "metaq user permit shop --topic 'shop-*=PUB|CREATE' --file users.yaml",
        "metaq user permit anonymous --topic news=SUB --group '*=SUB' --file users.yaml",
        "metaq user permit shop --topic 'shop-*=' --file users.yaml     # grant that no more",
    )
)
@click.argument("name")
@click.option("--topic", "topics", multiple=True, metavar="NAME=WORDS", help="PUB, SUB, CREATE, DENY, joined by |; repeatable.")
@click.option("--group", "groups", multiple=True, metavar="NAME=WORDS", help="SUB: consume for the group; may be repeated.")
@click.option("--admin/--no-admin", default=None, help="Allow everything.")
@file_option
def permit(name: str, topics: tuple[str, ...], groups: tuple[str, ...], admin: bool | None, file: Path) -> None:
    """Set what a user may do with topics and groups.

    A NAME that ends in * stands for all names that begin so. Clients without a login have the permissions of anonymous.
    """
    with editing(file) as users:
        known = users.get(name) or (User() if name == ANONYMOUS else None)
        if known is None or (name == ANONYMOUS and admin):
            raise ConfigError(f"there is no user {name} in {file} who can have this permission; add one with `metaq user add`")
        grants = _granted(known.topics, topics), _granted(known.groups, groups)
        users[name] = replace(known, topics=grants[0], groups=grants[1], admin=known.admin if admin is None else admin)


def _granted(known: dict[str, Permission], wanted: Iterable[str]) -> dict[str, Permission]:
    grants = dict(known)
    for line in wanted:
        name, separator, words = line.partition("=")
        if not separator or not name or "*" in name[:-1]:
            raise ConfigError(f"{line!r} is not NAME=WORDS; a NAME may end in *")
        if words:
            try:
                grants[name] = parse_permission(words)
            except ValueError as error:
                raise ConfigError(f"{line!r}: {error}") from error
        else:
            grants.pop(name, None)
    return grants


@user.command("list", epilog=examples("metaq user list --file users.yaml"))
@file_option
@json_option
def list_users(file: Path, as_json: bool) -> None:
    """List users and their permissions, without passwords."""
    print_rows([_row(name, one) for name, one in load_users(file).items()], as_json=as_json)


def _row(name: str, one: User) -> Row:
    kept = "secret" if one.secret is not None else "hash" if one.password is not None else "none"
    return {"user": name, "password": kept, "admin": one.admin, "topics": _grants(one.topics), "groups": _grants(one.groups)}


def _grants(table: dict[str, Permission]) -> list[str]:
    return [f"{name}={written_permission(permission)}" for name, permission in table.items()]
