"""Options and output that several commands share: the broker to ask, the login, and JSON."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from click.core import ParameterSource

from metaq.address import HIGHEST_PORT, REGISTRY_PORT, Address, parse_address
from metaq.cli.contexts import CONTEXT_VARIABLE, NamedAccess, contexts_file, read_contexts
from metaq.cli.numbers import IntRange
from metaq.errors import BadRequest, MetaqError, RouteNotFound, RouteProblem
from metaq.suggestions import did_you_mean

if TYPE_CHECKING:
    from metaq.client import Client, TextClient

SYSTEM_GROUP: Final = re.compile(r"CID_RMQ_SYS_.*|CID_ONS.*|TOOLS_CONSUMER|FILTERSRV_CONSUMER|SELF_TEST_.*")
"""Groups of brokers and of their tools."""

BROKER_PORT: Final = 8123
DEFAULT_BROKER: Final = f"127.0.0.1:{BROKER_PORT}"
DEFAULT_REGISTRY: Final = f"127.0.0.1:{REGISTRY_PORT}"

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
    """``HOST:PORT``, with a host of IPv6 in brackets; where there is a default port, also ``HOST``."""

    name = "HOST:PORT"

    def __init__(self, default_port: int | None = None) -> None:
        self._default_port = default_port

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Address:
        if isinstance(value, Address):
            return value
        try:
            return parse_address(str(value), default_port=self._default_port)
        except BadRequest:
            form = "HOST:PORT" if self._default_port is None else f"HOST or HOST:PORT (without a port: {self._default_port})"
            ports = f"with a port from 1 to {HIGHEST_PORT}, and with IPv6 in brackets"
            self.fail(f"{value!r} is not {form}, {ports}", parameter, context)


class FromContext(click.Option):
    """An address, which the context that applies may name."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        if source is ParameterSource.COMMANDLINE or ctx.resilient_parsing:
            return value, source
        applied = command_login().applied
        if applied is None or (source is ParameterSource.ENVIRONMENT and not applied.explicit):
            return value, source
        assert self.name is not None
        named = getattr(applied.context, self.name)
        if named:
            return named, ParameterSource.DEFAULT_MAP
        (other,) = {"broker", "registry"} - {self.name}
        if getattr(applied.context, other) and other not in {each.name for each in ctx.command.params}:
            missing = f"the context {applied.name} has no {self.name}"
            raise click.UsageError(f"{missing}; give --{self.name} HOST, or add the context again with one", ctx)
        return value, source


def broker_option(command: Decorated) -> Decorated:
    """Add ``--broker``, whose value is host and port."""
    return click.option(
        "--broker",
        cls=FromContext,
        type=AddressParameter(BROKER_PORT),
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
        cls=FromContext,
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
    return click.option("--partition", type=IntRange(default), default=default, show_default=True, metavar="N", help=text)


class Applied(NamedTuple):
    """The context that applies to a command."""

    name: str
    context: NamedAccess
    explicit: bool
    """True when the command line names it, and not only the environment or the file of contexts."""


class CommandLogin:
    """The user who runs a command, and the certificates it checks brokers with: the options of ``metaq`` itself.

    Of the command line, the environment and the context in use the first that says something counts; in each an option of its
    own counts before a context.
    """

    def __init__(self, given: Mapping[str, str], sources: Mapping[str, ParameterSource | None]) -> None:
        """Take the values of ``login_options`` by name, and where each comes from."""
        self._given = given
        self._sources = sources

    @cached_property
    def applied(self) -> Applied | None:
        """The context that applies, if there is one; ``ConfigError`` when it cannot be read, or does not exist."""
        asked = self._given.get("context", "")
        contexts = read_contexts(contexts_file())
        name = asked or contexts.used
        if not name:
            return None
        explicit = self._sources.get("context") is ParameterSource.COMMANDLINE
        return Applied(name, contexts.named(name, "--context" if explicit else CONTEXT_VARIABLE), explicit)

    @property
    def tls(self) -> str | bool:
        """The file with the certificates to check brokers with; false without TLS."""
        return self._value("tls_ca") or False

    def _value(self, name: str) -> str:
        value, source = self._given.get(name, ""), self._sources.get(name)
        if value and source is ParameterSource.COMMANDLINE:
            return value
        if self.applied is None or (value and not self.applied.explicit):
            return value
        return getattr(self.applied.context, name) or value

    def options(self) -> dict[str, Any]:
        """Return arguments for clients, with the password.

        The password is no command-line argument: anyone who can list processes sees those.
        """
        user = self._value("user")
        return {"user": user, "password": self._password(user) if user else "", "tls": self.tls}

    def _password(self, user: str) -> str:
        given = os.environ.get(PASSWORD_VARIABLE)
        if given:
            return given
        if self.applied is not None and self.applied.context.user == user and self.applied.context.password:
            return self.applied.context.password
        if users_file := self._given.get("users_file", ""):
            from metaq.server.access.users import credentials  # noqa: PLC0415 - the others are for commands with a users file
            from metaq.server.access.usersfile import load_users  # noqa: PLC0415

            return credentials(load_users(Path(users_file)), "--user", user).secret
        typed: str = click.prompt(f"Password of {user}", hide_input=True, err=True)
        return typed


def login_options(command: Decorated) -> Decorated:
    """Add ``--context``, ``--user``, ``--users-file`` and ``--tls-ca``."""
    for name, metavar, variable, text in reversed(
        (
            ("--context", "NAME", CONTEXT_VARIABLE, "The context with addresses and login, instead of the one in use."),
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
    return found if isinstance(found, CommandLogin) else CommandLogin({}, {})


def connect_text(broker: Address) -> "TextClient":
    """Return a client of the broker that ``--broker`` names."""
    from metaq.client import TextClient  # noqa: PLC0415 - a broker needs no client

    return TextClient(*broker, **command_login().options())


class NotThere(MetaqError):
    """The command names something that does not exist; the text says what, and what to do."""


@contextmanager
def connect_registry(registry: str) -> "Iterator[Client]":
    """Connect to the brokers that are registered where ``--registry`` says.

    ``NotThere`` takes the place of a ``RouteNotFound`` for a topic that does not exist.
    """
    from metaq.client import connect  # noqa: PLC0415 - a broker needs no client

    with connect(registry, **command_login().options()) as client:
        try:
            yield client
        except RouteNotFound as error:
            if error.reason is not RouteProblem.TOPIC_ABSENT:
                raise
            admin = client.admin()
            if not admin.brokers():
                absent = f"there is no topic {error.topic}: no broker is registered at {registry}"
                raise NotThere(f"{absent}; start one with --registries {registry}") from error
            raise NotThere(no_topic(error.topic, admin.topics())) from error


def no_topic(topic: str, known: Iterable[str]) -> str:
    """Return that a topic does not exist, with the one that may have been meant."""
    return f"there is no topic {topic}{did_you_mean(topic, known) or '; metaq topic list shows the topics'}"


def json_line(value: Mapping[str, Any] | list[Any]) -> bytes:
    """Return one line of JSON, in UTF-8 wherever it goes."""
    import json  # noqa: PLC0415 - for --json only

    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def print_json(value: Mapping[str, Any] | list[Any]) -> None:
    """Write one line of JSON to standard output."""
    click.echo(json_line(value), nl=False)
