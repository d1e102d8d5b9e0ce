"""``metaq serve``: run a broker. Every setting is a flag."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from metaq.cli.common import examples
from metaq.cli.host.settings import SettingsCommand, config_option, setting_options
from metaq.config import FIELDS, Settings, gather_settings, load
from metaq.server.addresses import NONE
from metaq.server.broker import Broker
from metaq.server.daemon import run
from metaq.server.reload import Origins
from metaq.server.replicas.replica import ReplicaServer
from metaq.store.recovery.progress import Tell


@click.command(
    cls=SettingsCommand,
    params=setting_options(FIELDS),
    epilog=examples(
        "metaq serve --data data",
        "metaq serve --data data --segment-bytes 256M --keep-hours 3d --idle-timeout-ms 90s",
        "metaq serve --data data --durability memory --log-format json",
    ),
)
@config_option("YAML file with settings, and with the topics that exist from the start")
def serve(config_file: Path | None, **flags: Any) -> int:
    """Run a broker until SIGTERM or Ctrl-C.

    When it serves, it prints one line: metaq ready listen=HOST:PORT registry=HOST:PORT data=DIR pid=N http=HOST:PORT
    console=http://HOST:PORT/

    Each setting is a flag, an environment variable (METAQ_KEEP_HOURS for --keep-hours) and a line of the
    configuration file (keep_hours: 3d). Flags override the environment, which overrides the file. On SIGHUP all
    three are read again, and settings that can change while the broker runs take effect (see metaq config doc).
    """
    given = {name: value for name, value in flags.items() if value is not None}
    read = partial(load, config_file, os.environ, given)
    settings = read()
    origins = {name: said.origin for name, said in gather_settings(config_file, os.environ, given).items()}
    kind = Broker.alone if settings.replication_listen == NONE else ReplicaServer

    def make(settings: Settings, tell: Tell) -> Broker | ReplicaServer:
        server = kind(settings, tell=tell)
        server.origins = Origins(settings, origins)
        return server

    return run(settings, make, read)
