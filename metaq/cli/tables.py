"""Rows of facts, for people as aligned columns, for scripts as one JSON object a line.

A row is the JSON object. For people its keys become headings, and the values of keys that end in ``_ms`` become local times.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metaq.cli.common import print_json

Row = Mapping[str, Any]

_ANY_WIDTH: Final = 100_000
"""Without a terminal, lines are not folded."""
_TIME: Final = "_ms"

GOOD: Final = "green"
DOUBTFUL: Final = "yellow"
BAD: Final = "red"
_COLOURS: Final = {"ok": GOOD, "warning": DOUBTFUL, "problem": BAD}
"""The colours of levels, the same in all commands. Rich leaves colours out where there is no terminal, and with NO_COLOR."""


def local_time(time_ms: int) -> str:
    """Return a Unix time as local date and time; empty for 0, which means that there is none.

    What programs say may be no time that a calendar has; then it is the number.
    """
    if not time_ms:
        return ""
    try:
        return datetime.fromtimestamp(time_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(time_ms)


def one_line(text: str) -> str:
    """Return text that cannot move the cursor or end the line, even if its sender meant to."""
    return "".join(sign if sign.isprintable() else "·" for sign in text)


def cell(key: str, value: Any) -> str:
    """Return a value as people read it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith(_TIME):
        return local_time(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={part}" for name, part in value.items())
    return one_line(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def print_rows(rows: Iterable[Row], *, as_json: bool, hidden: Collection[str] = ()) -> None:
    """Print rows with the same keys. The columns in ``hidden`` are only for scripts."""
    if as_json:
        for row in rows:
            print_json(row)
        return
    listed = list(rows)
    keys = [key for key in listed[0] if key not in hidden] if listed else []
    numbers = [key for key in keys if not key.endswith(_TIME) and all(type(row[key]) in (int, float) for row in listed)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for key in keys:
        heading = Text(key.removesuffix(_TIME).replace("_", " ").upper(), style="bold")
        table.add_column(heading, justify="right" if key in numbers else "left", overflow="fold")
    for row in listed:
        table.add_row(*(_text(key, row[key]) for key in keys))
    _print(table)


def print_record(row: Row, *, as_json: bool) -> None:
    """Print one row, with a line for each of its keys."""
    if as_json:
        print_json(row)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for key, value in row.items():
        table.add_row(Text(key.removesuffix(_TIME).replace("_", " "), style="bold"), Text(cell(key, value)))
    _print(table)


def _text(key: str, value: Any) -> Text:
    return Text(cell(key, value), style=_COLOURS.get(value, "") if key == "level" else "")


def _print(table: Table) -> None:
    """Print the table without the blanks that rich puts at the ends of lines."""
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_ANY_WIDTH)
    with console.capture() as written:
        console.print(table)
    lines: Sequence[str] = written.get().splitlines()
    for line in lines:
        click.echo(line.rstrip())
