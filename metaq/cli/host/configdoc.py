"""The page ``docs/configuration.md``, made from the settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_origin

from metaq.cli.host.settings import metavar
from metaq.config import LIVE, Settings, TopicSettings

HEAD: Final = """\
# Settings

This page is what `metaq config doc` prints: it is made of the settings themselves.

Each setting is a line of a configuration file (`metaq serve --config FILE`), an environment variable and a flag:

    max_body_bytes: 65536          # the file
    METAQ_MAX_BODY_BYTES=65536     # the environment, which wins over the file
    --max-body-bytes 65536         # a flag, which wins over both

A name that is no setting is refused, with the nearest one, and so is a setting that stands in a file twice. `conf/broker.yaml`
has every setting of `metaq serve` with its default and a comment, `conf/registry.yaml` those of `metaq registry`.

| command | what it does |
| --- | --- |
| `metaq config show` | the settings that `metaq serve` would have with the same arguments; what it prints is a file |
| `metaq config show --origin` | behind each who said it: `FILE:LINE`, the variable, the flag, or `default` |
| `metaq config show --running` | the settings in force in the broker at `--broker` |
| `metaq config check FILE` | says what is wrong with a file, and where |

## While it runs

At SIGHUP a broker or a registry reads file, environment and flags again (`kill -HUP PID`, `systemctl reload`):

- settings marked **live** that differ from what is in force are put in force, each with a line `setting changed` in the log;
- others that differ stay as they are, each with a line `setting needs a restart`;
- when anything is wrong with what is read, everything stays as it is, and the line `settings not reloaded` says why.

What an administrator changes by request (`mqadmin updateBrokerConfig`: brokerPermission, fileReservedTime, deleteWhen) is in
force until the process ends, in whatever role, or until a reload: that takes it back where file, environment and flags say
something else, whether they have changed or not, with a line `setting changed`. To keep such a change, write it into the file.

A limit that becomes lower closes and forgets nothing: it is in force for what comes. Limits of a command line and of a body are
for connections that come from then on. A topic that the file does not name any more stays; `metaq topic delete` deletes it. A
slave takes its topics from its master. Without `auto_create_topics` the template TBW102 allows nothing: its route leads
producers of new topics nowhere. A broker that was started in a terminal ends when the terminal is closed.

No setting is a secret, so all of them are shown; passwords and private keys stand in the files that `users_file`, `tls_key` and
`tls_certificate` name.

## The settings

"""
TOPICS: Final = """
## Topics

`topics` has an entry for each topic, in the file only:

    topics:
      orders: {partitions: 8}

"""
_UNITS: Final = {"ms": "ms", "bytes": "bytes", "hours": "h", "hour": "h", "ratio": "0 to 1"}
_KINDS: Final[dict[Any, str]] = {int: "number", float: "number", Path: "path", str: "text", bool: "true, false"}


def page() -> Iterator[str]:
    """Yield the page in pieces."""
    yield HEAD
    yield from _table(Settings.model_fields, live=LIVE)
    yield TOPICS
    yield from _table(TopicSettings.model_fields, live=None)


def _table(fields: dict[str, Any], live: frozenset[str] | None) -> Iterator[str]:
    columns = ["setting", "default", "unit", *([] if live is None else ["live"]), "what it is"]
    yield f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
    for name, field in fields.items():
        marks = [] if live is None else ["live" if name in live else ""]
        cells = [f"`{name}`", _default(field.default), _unit(name, field), *marks, field.description.replace("|", "\\|")]
        yield "| " + " | ".join(cells) + " |\n"


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '`""`'


def _unit(name: str, field: Any) -> str:
    bounds = {key: getattr(rule, key) for rule in field.metadata for key in ("ge", "le", "gt") if hasattr(rule, key)}
    unit = _UNITS.get(name.rpartition("_")[2], "")
    if not unit:
        if get_origin(field.annotation) is dict:
            return "table"
        unit = _KINDS.get(field.annotation) or metavar(field.annotation).replace("|", ", ")
    if "le" in bounds and unit != "0 to 1":
        return f"{unit}, {bounds.get('ge', 0)} to {bounds['le']}"
    return f"{unit}, from {bounds['ge']}" if bounds.get("ge") else unit
