"""``metaq registry``: run a registry of its own, for several brokers."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from metaq.cli.common import examples
from metaq.cli.host.settings import SettingsCommand, config_option, setting_options
from metaq.config import REGISTRY_SETTINGS, load
from metaq.server.daemon import run
from metaq.server.registry import RegistryServer


@click.command(
    cls=SettingsCommand,
    params=setting_options(REGISTRY_SETTINGS, registry_listen="--listen"),
    epilog=examples("metaq registry --data registry", "metaq registry --data registry --listen 127.0.0.1:9877"),
)
@config_option("YAML file with settings")
def registry(config_file: Path | None, **flags: Any) -> int:
    """Run a registry until SIGTERM or Ctrl-C: what RocketMQ calls a name server.

    When it serves, it prints one line: metaq registry ready listen=HOST:PORT data=DIR pid=N http=HOST:PORT

    Brokers find it through their setting registries. Several registries do not talk to each other: give all their addresses to
    every broker and client. A single broker needs no registry, because it runs its own.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    read = partial(load, config_file, os.environ, given, REGISTRY_SETTINGS)
    settings = read()
    return run(settings, lambda settings, _: RegistryServer(settings), read, settings.registry_listen)
