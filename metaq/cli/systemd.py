"""``metaq systemd``: a unit for this broker or registry."""

import sys
from pathlib import Path
from typing import Final

import click

from metaq.cli.common import examples
from metaq.deploy.unit import unit
from metaq.errors import ConfigError

COMMANDS: Final = {"broker": "serve", "registry": "registry"}


@click.command(
    epilog=examples(
        "metaq systemd > /etc/systemd/system/metaq.service",
        "metaq systemd --config /etc/metaq/broker.yaml --user metaq",
        "metaq systemd registry --data /var/lib/metaq-registry",
    )
)
@click.argument("kind", type=click.Choice(list(COMMANDS)), default="broker")
@click.option("--data", type=click.Path(path_type=Path), default="/var/lib/metaq", show_default=True, help="Its data folder.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="YAML file with settings.")
@click.option("--user", default="metaq", show_default=True, help="Who it runs as; useradd --system makes one.")
def systemd(kind: str, data: Path, config_file: Path | None, user: str) -> None:
    """Print a unit for systemd, with which this metaq runs as a service.

    It is of Type=notify, with a watchdog, and gets the time that it needs to recover. It runs as a user without privileges, and
    can write into its data folder only.
    """
    for path in (data, config_file):
        if path is not None and not path.is_absolute():
            raise ConfigError(f"{path}: a unit needs absolute paths, since it is started anywhere")
    program = Path(sys.executable).parent / "metaq"
    configured = f" --config {config_file}" if config_file else ""
    click.echo(unit(kind, f"{program} {COMMANDS[kind]} --data {data}{configured}", user, data), nl=False)
