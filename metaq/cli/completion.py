"""Completion of names in a shell: topics and groups, of which the broker or its registry is asked."""

import os
from collections.abc import Callable, Iterable
from typing import Any, Final

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from metaq.address import parse_address
from metaq.cli.common import DEFAULT_BROKER, DEFAULT_REGISTRY, PASSWORD_VARIABLE, SYSTEM_GROUP, CommandLogin
from metaq.cli.contexts import NamedAccess
from metaq.errors import MetaqError

TIMEOUT_S: Final = 1.0
"""A person who waits for a completion has pressed a key."""


class BrokerName(click.ParamType[str]):
    """The name of something that brokers know; any text is taken."""

    name = "text"

    def __init__(self, ask: Callable[[click.Context], Iterable[str]]) -> None:
        """``ask`` returns all names, for the command that is typed."""
        self._ask = ask

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin so; none where nobody answers in time."""
        try:
            found = sorted(self._ask(ctx))
        except (MetaqError, OSError):
            return []
        return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def _topics(context: click.Context) -> Iterable[str]:
    if "registry" in context.params and not context.params.get("broker"):
        from metaq.client import connect  # noqa: PLC0415 - only while a shell completes

        with connect(_said(context, "registry", DEFAULT_REGISTRY), timeout_s=TIMEOUT_S, **_login(context)) as client:
            return client.admin().topics()
    from metaq.client import TextClient, parse_stats  # noqa: PLC0415

    address = parse_address(_said(context, "broker", DEFAULT_BROKER))
    with TextClient(*address, timeout_s=TIMEOUT_S, **_login(context)) as text:
        return parse_stats(text.stats("topics"))


def _groups(context: click.Context) -> Iterable[str]:
    from metaq.client import connect  # noqa: PLC0415 - only while a shell completes

    with connect(_said(context, "registry", DEFAULT_REGISTRY), timeout_s=TIMEOUT_S, **_login(context)) as client:
        return [group.name for group in client.admin().groups() if not SYSTEM_GROUP.fullmatch(group.name)]


def _said(context: click.Context, name: str, otherwise: str) -> str:
    """Return the address that was typed so far, or is in the environment, or in the context that applies."""
    typed = context.params.get(name) if context.get_parameter_source(name) is not ParameterSource.DEFAULT else None
    said = typed or os.environ.get(f"METAQ_{name.upper()}") or getattr(_applied(context), name)
    return str(said or otherwise)


def _login(context: click.Context) -> dict[str, Any]:
    """Return the login that was typed, or is in the context that applies; a password is never asked for here."""
    said, applied = context.find_root().params, _applied(context)
    user = said.get("user") or applied.user
    password = os.environ.get(PASSWORD_VARIABLE) or (applied.password if user == applied.user else "")
    return {"user": user if password else "", "password": password, "tls": said.get("tls_ca") or applied.tls_ca or False}


def _applied(context: click.Context) -> NamedAccess:
    """Return the context that applies to the command that is typed; an empty one without."""
    root = context.find_root()
    applied = CommandLogin(root.params, {name: root.get_parameter_source(name) for name in root.params}).applied
    return NamedAccess() if applied is None else applied.context


_TYPES: Final[dict[str, click.ParamType[object]]] = {
    "topic": BrokerName(_topics),
    "topics": BrokerName(_topics),
    "group": BrokerName(_groups),
    "groups": BrokerName(_groups),
    "delay_level": click.Choice([str(level) for level in range(19)]),
    **{name: click.Path() for name in ("users_file", "tls_ca", "tls_certificate", "tls_key", "cluster_tls_ca", "data")},
}
"""The types of parameters by their names, while a shell completes: no command needs to know of it."""


def completing_names(command: click.Command) -> click.Command:
    """Return the command with parameters that complete the names of things, by the parameters' own names."""
    for parameter in command.params:
        parameter.type = _TYPES.get(parameter.name or "", parameter.type)
    if isinstance(command, click.Group):
        for one in command.commands.values():
            completing_names(one)
    return command
