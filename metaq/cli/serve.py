"""``metaq serve``: run a broker. Every setting is a flag."""

import os
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click

from metaq.config import Settings, load
from metaq.server.daemon import run

_METAVARS: Final[dict[Any, str]] = {int: "N", float: "X", Path: "DIR", str: "TEXT"}
_CONFIG_FILE_ONLY: Final = "topics"


def metavar(annotation: Any) -> str:
    """What stands for a setting's value in the help."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if issubclass(annotation, Enum):
        return "|".join(member.value for member in annotation)
    return _METAVARS[annotation]


def setting_options() -> list[click.Parameter]:
    """A flag for each setting. What is given stays text: the settings check file, environment and flags in the same words."""
    options: list[click.Parameter] = []
    for name, field in Settings.model_fields.items():
        if name == _CONFIG_FILE_ONLY:
            continue
        flag = "--" + name.replace("_", "-")
        text = f"{field.description}  [default: {field.default}]"
        if field.annotation is bool:
            options.append(click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=text))
        else:
            options.append(click.Option([flag], metavar=metavar(field.annotation), help=text))
    return options


@click.command(params=setting_options())
@click.option(
    "config_file",
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="YAML file with settings, and with the topics that exist from the start",
)
def serve(config_file: Path | None, **flags: Any) -> int:
    """Run a broker until SIGTERM or Ctrl-C.

    Once it serves it prints one line: metaq ready listen=HOST:PORT data=DIR pid=N

    Each setting is a flag, an environment variable (METAQ_SEGMENT_BYTES for --segment-bytes) and a line of the
    configuration file (segment_bytes: 1048576). Flags win over the environment, which wins over the file.
    """
    return run(load(config_file, os.environ, {name: value for name, value in flags.items() if value is not None}))
