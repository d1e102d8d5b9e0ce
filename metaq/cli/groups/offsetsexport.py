"""``metaq offsets export``: rows of ``metaq.protocol.remoting.offsetrows`` into a file."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final

import click

from metaq.cli.common import FAILED, connect_registry, examples, json_option, print_json, registry_option
from metaq.cli.progress import progress
from metaq.cli.times import TIMES, When
from metaq.client import Admin
from metaq.errors import ConfigError
from metaq.protocol.remoting.offsetrows import OffsetRow, encode_row

PARQUET: Final = "parquet"
JSON_LINES: Final = "jsonl"
STANDARD_OUTPUT: Final = "-"
UNFINISHED: Final = ".unfinished"

Write = Callable[[Iterable[OffsetRow], BinaryIO], int]
"""A function that writes rows and returns how many there were."""


@click.command(
    epilog=examples(
        "metaq offsets export --out now.jsonl",
        "metaq offsets export --format parquet --out week.parquet --from 72h",
        "metaq offsets export --out - | grep billing",
    ),
    help=f"""Write the offsets of all groups to FILE: a row for each partition of each group.

    FILE has RocketMQ groups, MetaQ groups from ZooKeeper, and the last position of each other reader of the text protocol.
    With --from it has what brokers have recorded since then, once a minute by default, as far as their logs reach back.

    {TIMES}""",
)
@click.option(
    "--format",
    "form",
    type=click.Choice([JSON_LINES, PARQUET]),
    default=JSON_LINES,
    show_default=True,
    help="JSON lines, or Parquet for Spark, DuckDB and the like.",
)
@click.option("--out", required=True, metavar="FILE", help="The file to write; - is standard output.")
@click.option("--from", "begin", type=When(), help="Export what was recorded at TIME and later, not the present offsets.")
@click.option("--to", "end", type=When(), help="Export only what was recorded before TIME.")
@registry_option
@json_option
def export(form: str, out: str, begin: datetime | None, end: datetime | None, registry: str, as_json: bool) -> int:
    if end is not None and begin is None:
        raise click.UsageError("--to needs --from")
    if form == PARQUET and out == STANDARD_OUTPUT:
        raise click.UsageError("Parquet needs a file; give its name with --out")
    if not Path(out).name:
        raise click.UsageError(f"--out is {out!r}, which is not the name of a file")
    write = _writer(form)
    problems: list[str] = []
    with connect_registry(registry) as client:
        admin = client.admin()
        rows = _now(admin, problems) if begin is None else admin.offset_export().history(begin, end)
        if out == STANDARD_OUTPUT:
            with progress("exporting", "rows", prints=True) as bar:
                write(bar.watch(rows), sys.stdout.buffer)
        else:
            with progress("exporting", "rows") as bar:
                count = _replace(Path(out), write, bar.watch(rows))
            if as_json:
                print_json({"file": out, "rows": count, "problems": problems})
            else:
                click.echo(f"exported {count} rows to {out}")
    for problem in problems:
        click.echo(f"metaq: groups are missing: {problem}", err=True)
    return FAILED if problems else 0


def _now(admin: Admin, problems: list[str]) -> Iterator[OffsetRow]:
    """Yield the rows of all masters; groups that they do not know go to ``problems``."""
    for broker in admin.masters():
        for page in admin.offset_export().pages(broker.address):
            yield from page.rows
            problem = f"broker {broker.name}: {page.problem}"
            if page.problem is not None and problem not in problems:
                problems.append(problem)


def _write_lines(rows: Iterable[OffsetRow], out: BinaryIO) -> int:
    count = 0
    for row in rows:
        out.write(encode_row(row) + b"\n")
        count += 1
    return count


def _writer(form: str) -> Write:
    """Return the function that writes a format. ``ConfigError`` where Parquet is not installed."""
    if form == JSON_LINES:
        return _write_lines
    try:
        from metaq.spark.report.offsetfile import write_parquet  # noqa: PLC0415 - an extra: nothing else here needs pyarrow
    except ImportError as error:
        reason = "Parquet needs the package pyarrow; pip install 'metaq-broker[spark]', or use --format jsonl"
        raise ConfigError(reason) from error
    return write_parquet


def _replace(path: Path, write: Write, rows: Iterable[OffsetRow]) -> int:
    """Write a file in full or, when an error occurs, not at all. Return the number of rows. ``ConfigError``."""
    unfinished = path.with_name(f"{path.name}{UNFINISHED}")
    try:
        with unfinished.open("wb") as out:
            count = write(rows, out)
        os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # where no file can be made, there is none
            unfinished.unlink()
    return count
