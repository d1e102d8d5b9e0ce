"""Settings as flags of a command, and its help, which shows them under headings."""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from metaq.cli.common import Decorated
from metaq.config import FIELDS
from metaq.quantities import BYTES, unit_of

_METAVARS: Final[dict[Any, str]] = {int: "N", float: "X", Path: "DIR", str: "TEXT"}
_CONFIG_FILE_ONLY: Final = "topics"


class SettingGroup(NamedTuple):
    """Settings that are shown under one heading."""

    heading: str
    common: str
    """Names of those that many people need, for ``--help``."""
    rare: str = ""
    """Names of the others, for ``--help-all``."""


GROUPS: Final = (
    SettingGroup("Data and addresses", "data listen remoting_listen registry_listen http_listen advertise"),
    SettingGroup(
        "Access",
        "allow_public users_file tls_certificate tls_key",
        "cluster_user cluster_tls_ca failed_logins_per_minute",
    ),
    SettingGroup(
        "Cluster and replicas",
        "broker_name cluster_name registries role replica_number replication_listen master zookeeper",
        "broker_number broker_permission min_in_sync replica_timeout_ms replica_lag_ms zookeeper_root zookeeper_session_ms "
        "registration_interval_ms registry_expiry_ms registry_scan_ms order_message_enable",
    ),
    SettingGroup(
        "Durability",
        "durability",
        "flush_messages flush_interval_ms sync_timeout_ms sweep_interval_ms checkpoint_interval_ms",
    ),
    SettingGroup("Files", "segment_bytes", "queue_file_bytes index_slots index_entries hot_bytes max_open_files"),
    SettingGroup(
        "Retention",
        "keep_hours delete_hour",
        "clean_ratio force_ratio refuse_ratio ample_free_bytes least_free_bytes retention_interval_ms",
    ),
    SettingGroup(
        "Connections",
        "max_connections",
        "max_connections_bytes max_unsent_bytes max_waiting_bytes max_held_gets max_hold_ms max_cold_reads max_transfer_bytes "
        "handshake_timeout_ms idle_timeout_ms drain_timeout_ms",
    ),
    SettingGroup(
        "Messages", "max_body_bytes max_message_bytes", "max_line_bytes max_delay_ms timer_engine store_replies sql_filter"
    ),
    SettingGroup(
        "Topics and groups",
        "auto_create_topics default_partitions auto_create_groups",
        "max_topics max_groups client_expiry_ms client_scan_ms offset_snapshot_interval_ms offset_export_interval_ms",
    ),
    SettingGroup(
        "Transactions",
        "",
        "transaction_timeout_ms max_branches max_branch_bytes max_open_transaction_bytes check_after_ms check_interval_ms "
        "max_checks",
    ),
    SettingGroup("Log lines", "log_format log_level"),
)
_FORMS: Final = (
    "SIZE is a number of bytes, or 64K, 512M, 1G, 2T (K is 1024). LENGTH is a number of what the name ends in (ms, hours), or "
    "250ms, 90s, 15m, 12h, 3d."
)


def metavar(name: str, annotation: Any) -> str:
    """Return the placeholder of a setting's value in the help."""
    words = _words(annotation)
    if words:
        return "|".join(words)
    unit = unit_of(name)
    return _METAVARS[annotation] if unit is None else "SIZE" if unit is BYTES else "LENGTH"


def _words(annotation: Any) -> tuple[str, ...]:
    """Return the words of which a setting takes one; none for other settings."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(member.value for member in annotation) if issubclass(annotation, Enum) else ()


def as_written(name: str, value: Any) -> str:
    """Return a value as a person would write it: sizes and lengths of time with a unit."""
    unit = unit_of(name)
    if unit is not None and isinstance(value, int | float):
        return unit.write(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


class SettingOption(click.Option):
    """A flag for one setting.

    Its value stays text: the settings check file, environment and flags with the same messages.
    """

    def __init__(self, setting: str, flag: str) -> None:
        field = FIELDS[setting]
        default = as_written(setting, field.default)
        text = field.rules.description + (f"  [default: {default}]" if default else "")
        if field.annotation is bool:
            super().__init__([setting, f"{flag}/--no-{flag[2:]}"], default=None, help=text)
        else:
            super().__init__([setting, flag], metavar=metavar(setting, field.annotation), help=text)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the words that the setting takes, if it takes only some."""
        words = _words(FIELDS[self.name or ""].annotation)
        if words:
            return [CompletionItem(word) for word in words if word.startswith(incomplete)]
        return super().shell_complete(ctx, incomplete)


class SettingsCommand(click.Command):
    """A command with settings as flags: ``--help`` shows the common ones under headings, ``--help-all`` all of them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), self._help_all()]

    def _help_all(self) -> click.Option:
        def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
            if wanted and not context.resilient_parsing:
                context.meta[_ALL] = True
                click.echo(self.get_help(context))
                context.exit()

        text = "Show this message with all settings."
        return click.Option(["--help-all"], is_flag=True, expose_value=False, is_eager=True, callback=show, help=text)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        everything = bool(ctx.meta.get(_ALL))
        mine = {option.name: option for option in self.params if isinstance(option, SettingOption)}
        others = [option for option in self.get_params(ctx) if not isinstance(option, SettingOption)]
        with formatter.section("Options"):
            formatter.write_dl([row for option in others if (row := option.get_help_record(ctx)) is not None])
        for heading, names in _sections(everything=everything):
            listed = [mine[name] for name in names if name in mine]
            if listed:
                with formatter.section(heading):
                    formatter.write_dl([row for option in listed if (row := option.get_help_record(ctx)) is not None])
        formatter.write_paragraph()
        formatter.write_text(_FORMS)
        if not everything:
            formatter.write_paragraph()
            formatter.write_text(f"All {len(mine)} settings: {ctx.command_path} --help-all")


_ALL: Final = "metaq.cli.host.settings.all"


def _sections(*, everything: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the headings, and the names under each."""
    for group in GROUPS:
        yield group.heading, f"{group.common} {group.rare if everything else ''}".split()


def setting_options(names: Iterable[str], **other_flags: str) -> list[click.Parameter]:
    """Return a flag for each setting, named by ``other_flags`` or like the setting."""
    return [
        SettingOption(name, other_flags.get(name, "--" + name.replace("_", "-"))) for name in names if name != _CONFIG_FILE_ONLY
    ]


def config_option(text: str) -> Callable[[Decorated], Decorated]:
    """Add ``--config``."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("config_file", "--config", type=path, metavar="FILE", help=text)
