"""``metaq systemd``: a systemd unit for this broker or registry."""

import re
import sys
from pathlib import Path
from typing import Final

import click

from metaq.cli.common import examples
from metaq.config import FIELDS, REGISTRY_SETTINGS, gather_settings
from metaq.deploy.unit import ABSOLUTE_PATH, unit
from metaq.errors import ConfigError

COMMANDS: Final = {"broker": "serve", "registry": "registry"}
DATA: Final = Path("/var/lib/metaq")


@click.command(
    epilog=examples(
        "metaq systemd > /etc/systemd/system/metaq.service",
        "metaq systemd --config /etc/metaq/broker.yaml --user metaq",
        "metaq systemd registry --data /var/lib/metaq-registry",
    )
)
@click.argument("kind", type=click.Choice(list(COMMANDS)), default="broker")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help=f"The data folder.  [default: as in the file of --config, else {DATA}]",
)
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="YAML file with settings.")
@click.option("--user", default="metaq", show_default=True, help="The user it runs as; useradd --system creates one.")
def systemd(kind: str, data: Path | None, config_file: Path | None, user: str) -> None:
    """Print a systemd unit that runs this metaq as a service.

    The unit has Type=notify and a watchdog, and allows the time that recovery needs. The service runs as a user without
    privileges, and can only write into its data folder.
    """
    said = gather_settings(config_file, {}, {}, FIELDS if kind == "broker" else REGISTRY_SETTINGS).get("data")
    configured = None if said is None else Path(str(said.value))
    if said is not None and data not in (None, configured):
        raise ConfigError(f"data: {data} by --data, and {configured} in {said.origin}; give only one of them")
    folder = data or configured or DATA
    program = Path(sys.executable).parent / "metaq"
    for path in (program, folder, config_file):
        if path is not None and not path.is_absolute():
            raise ConfigError(f"{path}: a unit needs absolute paths")
        if path is not None and not re.fullmatch(ABSOLUTE_PATH, str(path)):
            raise ConfigError(f"{path}: a unit needs paths of letters, digits and ./+-_, because others are special to systemd")
    words = [str(program), COMMANDS[kind], *(() if configured else ("--data", str(folder)))]
    words += [] if config_file is None else ["--config", str(config_file)]
    click.echo(unit(kind, " ".join(words), user, folder), nl=False)
