"""Configuration files: YAML, one ``setting: value`` a line, each value with the line that it came from."""

from pathlib import Path
from typing import Any, Final

import yaml

from metaq.errors import ConfigError
from metaq.fields import Given
from metaq.reasons import reason_of

WRONG_VALUES: Final = (ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""The errors, apart from its own, that the YAML library raises for text that does not fit its tag or its form."""


def write_value(value: Any) -> str:
    """Return a setting's value as it is written in a configuration file, on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True).removesuffix("\n...\n").rstrip("\n")
    )


def read_yaml(file: Path) -> dict[str, Given]:
    """Return the settings in a YAML file; ``ConfigError`` when it cannot be read or is not a list of ``name: value`` lines."""
    try:
        with file.open(encoding="utf-8") as stream:
            loader = yaml.SafeLoader(stream)
            node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{file} is not a list of `setting: value` lines")
        given: dict[str, Given] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in given:  # YAML would silently take the last one
                raise ConfigError(f"{name} is set twice, in {given[name].origin} and in line {line}")
            given[name] = Given(_constructed(loader, name, value, f"{file}:{line}"), f"{file}:{line}")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {reason_of(error)}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}" if mark else ""
        problem = error.problem or error.context
        raise ConfigError(f"cannot read the configuration file {file}{place}: this is no YAML: {problem}") from error
    except (yaml.YAMLError, *WRONG_VALUES) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from error
    return given


def _constructed(loader: yaml.SafeLoader, name: str, node: yaml.Node, origin: str) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except WRONG_VALUES as error:
        value = repr(node.value[:60]) if isinstance(node, yaml.ScalarNode) else "the value"
        raise ConfigError(f"{name}: {value} cannot be read as {node.tag.rpartition(':')[2]} ({origin})") from error
