"""Options and output that several commands share: the broker to ask, the login, and JSON."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from metaq.address import Address, parse_address
from metaq.errors import BadRequest

if TYPE_CHECKING:
    from metaq.client import Client, TextClient

SYSTEM_GROUP: Final = re.compile(r"CID_RMQ_SYS_.*|CID_ONS.*|TOOLS_CONSUMER|FILTERSRV_CONSUMER|SELF_TEST_.*")
"""Groups of brokers and of their tools."""

DEFAULT_BROKER: Final = "127.0.0.1:8123"
DEFAULT_REGISTRY: Final = "127.0.0.1:9876"

# Exit codes beside 0; described in the help of `metaq`.
FAILED: Final = 1
USAGE: Final = 2
NOT_CONNECTED: Final = 3
REFUSED: Final = 4
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141

PASSWORD_VARIABLE: Final = "METAQ_PASSWORD"  # noqa: S105 - a name
NOTHING_CHANGED: Final = "nothing was changed; add --yes to do it"

Decorated = Callable[..., Any]


class AddressParameter(click.ParamType[Address]):
    """``HOST:PORT``, with a host of IPv6 in brackets."""

    name = "HOST:PORT"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Address:
        if isinstance(value, Address):
            return value
        try:
            return parse_address(str(value))
        except BadRequest:
            self.fail(f"{value!r} is not HOST:PORT", parameter, context)


def broker_option(command: Decorated) -> Decorated:
    """Add ``--broker``, whose value is host and port."""
    return click.option(
        "--broker",
        type=AddressParameter(),
        default=DEFAULT_BROKER,
        envvar="METAQ_BROKER",
        show_default=True,
        show_envvar=True,
        help="The broker to connect to.",
    )(command)


def registry_option(command: Decorated) -> Decorated:
    """Add ``--registry``, whose value is for ``metaq.connect``."""
    return click.option(
        "--registry",
        default=DEFAULT_REGISTRY,
        envvar="METAQ_REGISTRY",
        metavar="HOST:PORT",
        show_default=True,
        show_envvar=True,
        help="The registry that knows the brokers; separate several with ;.",
    )(command)


def yes_option(command: Decorated) -> Decorated:
    """Add ``--yes``."""
    return click.option("--yes", is_flag=True, help="Do it. Without this, only show what would be done.")(command)


def examples(*lines: str) -> str:
    """Return the end of a command's help: commands that a person may type."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def json_option(command: Decorated) -> Decorated:
    """Add ``--json``."""
    return click.option("as_json", "--json", is_flag=True, help="Print JSON, for scripts.")(command)


def partition_option(default: int, text: str) -> Callable[[Decorated], Decorated]:
    """Add ``--partition``."""
    return click.option("--partition", type=int, default=default, show_default=True, metavar="N", help=text)


class CommandLogin(NamedTuple):
    """The user who runs a command, and the certificates it checks brokers with: the options of ``metaq`` itself."""

    user: str = ""
    users_file: str = ""
    tls_ca: str = ""

    def options(self) -> dict[str, Any]:
        """Return arguments for clients, with the password.

        The password is no command-line argument: anyone who can list processes sees those.
        """
        return {"user": self.user, "password": self._password() if self.user else "", "tls": self.tls_ca or False}

    def _password(self) -> str:
        given = os.environ.get(PASSWORD_VARIABLE)
        if given:
            return given
        if self.users_file:
            from metaq.server.access.users import credentials  # noqa: PLC0415 - the others are for commands with a users file
            from metaq.server.access.usersfile import load_users  # noqa: PLC0415

            return credentials(load_users(Path(self.users_file)), "--user", self.user).secret
        typed: str = click.prompt(f"Password of {self.user}", hide_input=True, err=True)
        return typed


def login_options(command: Decorated) -> Decorated:
    """Add ``--user``, ``--users-file`` and ``--tls-ca``, and keep them for ``connect_text``."""
    for name, metavar, variable, text in reversed(
        (
            ("--user", "NAME", "METAQ_USER", f"The user; the password is read from {PASSWORD_VARIABLE}, or asked for."),
            (
                "--users-file",
                "FILE",
                "METAQ_USERS_FILE",
                "Users file of a broker on this machine, from which the password of --user is read.",
            ),
            ("--tls-ca", "FILE", "METAQ_TLS_CA", "Use TLS, and check certificates with those in this file (PEM)."),
        )
    ):
        command = click.option(name, default="", metavar=metavar, envvar=variable, show_envvar=True, help=text)(command)
    return command


def command_login() -> CommandLogin:
    """Return the login of the command that runs."""
    found = click.get_current_context().find_root().obj
    return found if isinstance(found, CommandLogin) else CommandLogin()


def connect_text(broker: Address) -> "TextClient":
    """Return a client of the broker that ``--broker`` names."""
    from metaq.client import TextClient  # noqa: PLC0415 - a broker needs no client

    return TextClient(*broker, **command_login().options())


def connect_registry(registry: str) -> "Client":
    """Return a client of the brokers that are registered where ``--registry`` says."""
    from metaq.client import connect  # noqa: PLC0415 - a broker needs no client

    return connect(registry, **command_login().options())


def json_line(value: Mapping[str, Any] | list[Any]) -> bytes:
    """Return one line of JSON, in UTF-8 wherever it goes."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def print_json(value: Mapping[str, Any] | list[Any]) -> None:
    """Write one line of JSON to standard output."""
    click.echo(json_line(value), nl=False)
