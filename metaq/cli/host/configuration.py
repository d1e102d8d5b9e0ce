"""``metaq config``: the settings, their origins, and a check of a file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from metaq.address import Address
from metaq.cli.admin import CONFIG, config_texts
from metaq.cli.common import broker_option, connect_text, examples, json_option, print_json
from metaq.cli.host.configdoc import page
from metaq.cli.host.settings import SettingsCommand, config_option, setting_options
from metaq.cli.suggestions import Suggesting
from metaq.config import FIELDS, Settings, check, gather_settings
from metaq.configfile import write_value
from metaq.errors import ConfigError
from metaq.fields import from_values, plain

RUNNING = "metaq"
"""The section of ``stats config`` that holds the settings under their names."""


@click.group(cls=Suggesting, short_help="Show settings and where they come from; check a file.")
def config() -> None:
    """Show the settings and where each comes from, check a configuration file, print the page about them."""


@config.command(
    cls=SettingsCommand,
    epilog=examples(
        "metaq config show --config conf/broker.yaml --origin",
        "metaq config show --max-body-bytes 65536 > broker.yaml",
        "metaq config show --running --broker 127.0.0.1:8123",
    ),
    params=setting_options(FIELDS),
)
@config_option("The configuration file that metaq serve is to read.")
@click.option("--origin", is_flag=True, help="Add where each one comes from: FILE:LINE, METAQ_NAME, --flag, or default.")
@click.option("--running", is_flag=True, help="Show the settings in force in the broker at --broker.")
@broker_option
@json_option
def show(config_file: Path | None, origin: bool, running: bool, broker: Address, as_json: bool, **flags: Any) -> None:
    """Print the settings that metaq serve would use with this file, environment and flags, as a configuration file."""
    said = {name: value for name, value in flags.items() if value is not None}
    if running:
        if config_file is not None or said or origin:
            raise ConfigError("--running asks a broker; it cannot be combined with --origin or other settings")
        _print(_of_broker(broker), {}, as_json=as_json)
        return
    given = gather_settings(config_file, os.environ, said)
    values = plain(check(given))
    origins = {name: given[name].origin if name in given else "default" for name in values} if origin else {}
    _print(values, origins, as_json=as_json)


def _of_broker(broker: Address) -> dict[str, Any]:
    with connect_text(broker) as client:
        values = config_texts(client.stats(CONFIG))[RUNNING]
    known = {name: value for name, value in values.items() if name in FIELDS}  # a broker of another version has other settings
    return {name: value for name, value in plain(from_values(Settings, known)).items() if name in known}


def _print(values: Mapping[str, Any], origins: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        if origins:
            values = {name: {"value": value, "origin": origins[name]} for name, value in values.items()}
        print_json(values)
        return
    lines = {name: f"{name}: {write_value(value)}" for name, value in values.items()}
    width = max(map(len, lines.values()))
    for name, line in lines.items():
        click.echo(f"{line:{min(width, 60)}}  # {origins[name]}" if origins else line)


@config.command("check", epilog=examples("metaq config check /etc/metaq/broker.yaml"))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@json_option
def check_file(file: Path, as_json: bool) -> None:
    """Check whether metaq serve would accept FILE, without environment and flags.

    The exit code is 2 if it would not. Errors go to standard error, each with its line.
    """
    given = gather_settings(file, {}, {})
    settings, defaults = check(given), Settings()
    changed = [name for name in given if getattr(settings, name) != getattr(defaults, name)]
    if as_json:
        print_json({"file": str(file), "settings": len(given), "changed": changed})
    else:
        click.echo(f"{file} is valid: {len(given)} settings, {len(changed)} of them differ from the default")


@config.command(epilog=examples("metaq config doc > docs/configuration.md"))
def doc() -> None:
    """Print the page about all settings: names, defaults, units, and which can change while a broker runs."""
    for piece in page():
        click.echo(piece, nl=False)
