"""The page ``docs/configuration.md``, made from the settings."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_origin

from metaq.cli.host.settings import as_written, metavar
from metaq.config import FIELDS, LIVE, TopicSettings
from metaq.fields import Declared, declared
from metaq.quantities import unit_of

HEAD: Final = """\
# Settings

`metaq config doc` prints this page from the settings themselves.

Give a setting in a configuration file (`metaq serve --config FILE`), in the environment or by a flag:

    max_body_bytes: 65536          # the file
    METAQ_MAX_BODY_BYTES=65536     # the environment, which overrides the file
    --max-body-bytes 65536         # a flag, which overrides both

Write sizes and lengths of time as plain numbers in the unit that the setting's name ends in, or with a unit of their own:

| name ends in | plain number | or |
| --- | --- | --- |
| `_bytes` | bytes | `64K`, `512M`, `1G`, `2T`, also `64KiB`; K is 1024 |
| `_ms` | milliseconds | `250ms`, `90s`, `15m`, `12h`, `3d` |
| `_hours` | hours | the same: `90m`, `12h`, `3d` |

`metaq config show` prints plain numbers. What could mean two things is refused: `1GB` (1000³ or 1024³?), `1m` as a size.

An unknown name is an error, which suggests the nearest known name. A setting that occurs twice in a file is an error, too.
`conf/broker.yaml` has every setting of `metaq serve` with its default and a comment, `conf/registry.yaml` those of
`metaq registry`.

| command | what it does |
| --- | --- |
| `metaq config show` | prints what `metaq serve` would use with the same arguments, as a configuration file |
| `metaq config show --origin` | adds where each one comes from: `FILE:LINE`, the variable, the flag, or `default` |
| `metaq config show --running` | prints the settings in force in the broker at `--broker` |
| `metaq config check FILE` | reports what is wrong with a file, and where |

## While it runs

On SIGHUP (`kill -HUP PID`, `systemctl reload`) a broker or a registry reads file, environment and flags again:

- changed settings that are marked **live** take effect, each with a line `setting changed` in the log;
- other changed settings stay as they are, each with a line `setting needs a restart`;
- if there is any error, nothing changes, and the line `settings not reloaded` gives the reason.

An administrator can change brokerPermission, fileReservedTime and deleteWhen by request (`mqadmin updateBrokerConfig`). Such a
change lasts until the process ends or reloads, also if the replica's role changes. A reload restores what file, environment and
flags say, with a line `setting changed`. To keep the change, write it into the file.

If you lower a limit, nothing that exists is closed or dropped: the limit applies to what comes later. Limits of command lines
and bodies apply to new connections. A topic that you remove from the file remains; `metaq topic delete` deletes it. A slave
takes its topics from its master. Without `auto_create_topics` the template TBW102 permits nothing, so producers of new topics
get no route. A broker that was started in a terminal ends when the terminal is closed.

No setting is a secret, so all of them are shown. Passwords and private keys are in the files that `users_file`, `tls_key` and
`tls_certificate` name.

## The settings

"""
TOPICS: Final = """
## Topics

`topics` has an entry for each topic. It can only be set in the file:

    topics:
      orders: {partitions: 8}

"""
_UNITS: Final = {"ms": "ms", "bytes": "bytes", "hours": "hours", "hour": "hour", "ratio": "0 to 1"}
_KINDS: Final[dict[Any, str]] = {int: "number", float: "number", Path: "path", str: "text", bool: "true, false"}


def page() -> Iterator[str]:
    """Yield the page in pieces."""
    yield HEAD
    yield from _table(FIELDS, live=LIVE)
    yield TOPICS
    yield from _table(declared(TopicSettings), live=None)


def _table(fields: Mapping[str, Declared], live: frozenset[str] | None) -> Iterator[str]:
    columns = ["setting", "default", "unit", *([] if live is None else ["live"]), "what it is"]
    yield f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
    for name, field in fields.items():
        marks = [] if live is None else ["live" if name in live else ""]
        cells = [
            f"`{name}`",
            _default(name, field.default),
            _unit(name, field),
            *marks,
            field.rules.description.replace("|", "\\|"),
        ]
        yield "| " + " | ".join(cells) + " |\n"


def _default(name: str, value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return as_written(name, value) or '`""`'


def _unit(name: str, field: Declared) -> str:
    ge, gt, le = field.rules.ge, field.rules.gt, field.rules.le
    unit = _UNITS.get(name.rpartition("_")[2], "")
    if not unit:
        if get_origin(field.annotation) is dict:
            return "table"
        unit = _KINDS.get(field.annotation) or metavar(name, field.annotation).replace("|", ", ")
    if unit == "0 to 1":
        return unit
    if le is not None:
        least = _bound(name, ge or 0) if gt is None else f"above {_bound(name, gt)}"
        return f"{unit}, {least} to {_bound(name, le)}"
    return f"{unit}, from {_bound(name, ge)}" if ge else unit


def _bound(name: str, value: float) -> str:
    return str(value) if unit_of(name) is None else as_written(name, value)
