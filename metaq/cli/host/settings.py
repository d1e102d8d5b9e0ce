"""Settings as flags of a command."""

from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click

from metaq.cli.common import Decorated
from metaq.config import FIELDS

_METAVARS: Final[dict[Any, str]] = {int: "N", float: "X", Path: "DIR", str: "TEXT"}
_CONFIG_FILE_ONLY: Final = "topics"


def metavar(annotation: Any) -> str:
    """Return the placeholder of a setting's value in the help."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if issubclass(annotation, Enum):
        return "|".join(member.value for member in annotation)
    return _METAVARS[annotation]


def setting_options(names: Iterable[str], **other_flags: str) -> list[click.Parameter]:
    """Return a flag for each setting, named by ``other_flags`` or like the setting.

    Values stay text: the settings check file, environment and flags with the same messages.
    """
    options: list[click.Parameter] = []
    for name in names:
        if name == _CONFIG_FILE_ONLY:
            continue
        field = FIELDS[name]
        flag = other_flags.get(name, "--" + name.replace("_", "-"))
        text = f"{field.rules.description}  [default: {field.default}]"
        if field.annotation is bool:
            options.append(click.Option([name, f"{flag}/--no-{flag[2:]}"], default=None, help=text))
        else:
            options.append(click.Option([name, flag], metavar=metavar(field.annotation), help=text))
    return options


def config_option(text: str) -> Callable[[Decorated], Decorated]:
    """Add ``--config``."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("config_file", "--config", type=path, metavar="FILE", help=text)
