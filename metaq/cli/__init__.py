"""The ``metaq`` command."""

import errno
import importlib
import os
import sys
from typing import Any, Final, TextIO

import click

from metaq import __version__
from metaq.cli.common import (
    FAILED,
    INTERRUPTED,
    NOT_CONNECTED,
    OUTPUT_CLOSED,
    PASSWORD_VARIABLE,
    REFUSED,
    USAGE,
    CommandLogin,
    login_options,
)
from metaq.cli.suggestions import Suggesting
from metaq.errors import (
    ConfigError,
    ConnectionFailed,
    MetaqError,
    ProtocolError,
    Refused,
    RequestTimeout,
    RouteNotFound,
    RouteProblem,
    SendFailed,
    UnknownHandle,
)
from metaq.form import FORM
from metaq.protocol.remoting.codes import Response
from metaq.protocol.text.replies import NOT_FOUND

EXIT_CODES: Final = f"""\
\b
Exit codes:
  0    done
  {FAILED}    not found: topic, group, message or transaction; verify: damage found; serve, registry: not started
  {USAGE}    a wrong argument or setting
  {NOT_CONNECTED}    no connection to the registry or the broker, or no answer in time
  {REFUSED}    the broker refused
  {INTERRUPTED}  interrupted by Ctrl-C
  {OUTPUT_CLOSED}  the output cannot be written: its reader is gone, or its disk is full

\b
doctor and why-not-consuming: 0 all is well, 1 a warning, 2 a problem
"""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ABSENT: Final = frozenset((NOT_FOUND, Response.TOPIC_NOT_EXIST, Response.QUERY_NOT_FOUND))
_ROUTE_CODES: Final = {
    RouteProblem.REGISTRY_UNREACHABLE: NOT_CONNECTED,
    RouteProblem.TOPIC_ABSENT: FAILED,
    RouteProblem.NO_LIVE_MASTER: NOT_CONNECTED,
    RouteProblem.NO_PERMISSION: REFUSED,
}


def exit_code(error: MetaqError) -> int:
    """Return the process's exit code for an error that ended a command."""
    from metaq.client import PutManyFailed  # noqa: PLC0415 - a broker needs no client

    if isinstance(error, PutManyFailed):
        return exit_code(error.reason)
    if isinstance(error, SendFailed):
        return exit_code(error.attempts[-1][1])
    if isinstance(error, RouteNotFound):
        return _ROUTE_CODES[error.reason]
    if isinstance(error, ConnectionFailed | RequestTimeout):
        return NOT_CONNECTED
    if isinstance(error, Refused):
        return FAILED if error.code in _ABSENT or isinstance(error, UnknownHandle) else REFUSED
    return USAGE if isinstance(error, ConfigError | ProtocolError) else FAILED


MODULES: Final = {
    "serve": "host.serve",
    "registry": "host.registry",
    "config": "host.configuration",
    "context": "host.context",
    "zookeeper": "host.zookeeper",
    "systemd": "host.systemd",
    "console": "host.console",
    "put": "messages.lines",
    "get": "messages.lines",
    "tail": "messages.lines",
    "offset": "admin",
    "stats": "admin",
    "topic": "messages.topics",
    "message": "messages.messages",
    "timer": "messages.timers",
    "cron": "messages.cron",
    "lease": "groups.leases",
    "group": "groups.groups",
    "why-not-consuming": "groups.groups",
    "dlq": "groups.deadletters",
    "offsets": "groups.offsets",
    "tx": "messages.transactions",
    "cluster": "cluster.cluster",
    "top": "cluster.top",
    "doctor": "doctor.doctor",
    "user": "host.users",
    "verify": "host.verify",
    "debug-bundle": "doctor.bundle",
    "bench": "messages.bench",
}
"""The module of each command, imported when it is used: a broker needs no rich, and ``put`` none of the settings' libraries."""


_COMPLETES: Final = "_METAQ_COMPLETE"
"""Set by a shell that completes what a person types, as click documents."""


def _completing(command: click.Command) -> click.Command:
    """Return a command that completes names, too, while a shell asks for that."""
    if _COMPLETES in os.environ:
        from metaq.cli.completion import completing_names  # noqa: PLC0415 - for shells only

        return completing_names(command)
    return command


def _discard(stream: TextIO) -> None:
    """Write the rest of a stream nowhere: the interpreter flushes it once more at its exit, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """Print an error; nothing where standard error cannot be written either: the exit code is left to say it."""
    try:
        click.echo(f"metaq: {text}", err=True)
    except OSError:
        _discard(sys.stderr)


class Commands(Suggesting):
    """Commands that return their exit code, or raise a ``MetaqError``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        command = getattr(importlib.import_module(f"metaq.cli.{MODULES[cmd_name]}"), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return _completing(command)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except MetaqError as error:
            _say(error.told)
            code = exit_code(error)
        except BrokenPipeError:
            _discard(sys.stdout)
            code = OUTPUT_CLOSED
        except OSError as error:
            if error.errno not in _FULL:
                raise
            _discard(sys.stdout)
            _say(f"cannot write the output: {error.strerror}")
            code = OUTPUT_CLOSED
        except click.Abort as error:  # the end of a prompt
            if isinstance(error.__context__, EOFError):
                _say(f"there is nobody to ask for the password; set {PASSWORD_VARIABLE}")
                code = USAGE
            else:
                code = INTERRUPTED
        except KeyboardInterrupt:
            code = INTERRUPTED
        ctx.exit(code or 0)


@click.group(cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message=f"%(prog)s %(version)s ({FORM})")
@login_options
@click.pass_context
def commands(running: click.Context, /, **given: str) -> None:
    """A message broker in one process: start it, put and get messages, operate it."""
    running.obj = CommandLogin(given, {name: running.get_parameter_source(name) for name in given})


def main() -> None:
    """Run the command line; this never returns."""
    _completing(commands)(prog_name="metaq")
