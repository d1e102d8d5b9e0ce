"""The report of one suite: its figures as tables, and as files in Markdown and raw JSON."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from benchmarks.figures import Check, Spread, Verdict
from benchmarks.peers import System
from benchmarks.tested import tree
from metaq.form import FORM


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Report:
    """The results of one suite. `settings` are the parameters that the figures depend on."""

    name: str
    settings: Mapping[str, str]
    tables: Sequence[Table]
    checks: Sequence[Check] = ()
    raw: Sequence[Mapping[str, object]] = ()
    notes: Sequence[str] = field(default_factory=list)
    failures: Sequence[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """No must was missed and nothing failed. What could not be measured (a peer is absent) does not count."""
        return not self.failures and all(check.must_verdict is not Verdict.MISSED for check in self.checks)


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def middle(value: Spread | None, digits: int = 0) -> str:
    """The median alone."""
    return number(value.median if value else None, digits)


def of_rounds(value: Spread | None, digits: int = 0) -> str:
    """`median (low to high)`, or the value alone when there was one round."""
    if value is None:
        return "-"
    if value.rounds == 1:
        return number(value.median, digits)
    return f"{number(value.median, digits)} ({number(value.low, digits)} to {number(value.high, digits)})"


def checks_table(checks: Sequence[Check]) -> Table:
    rows = [
        [
            check.name,
            "-" if check.measured is None else f"{number(check.measured, 2)} {check.unit}".strip(),
            _bound(check, check.must),
            check.must_verdict.value,
            _bound(check, check.aim),
            check.aim_verdict.value,
        ]
        for check in checks
    ]
    return Table("Requirements", ["what", "measured", "must", "", "aim", ""], rows)


def _bound(check: Check, bound: float | None) -> str:
    return "-" if bound is None else f"{'≥' if check.sense == 'at least' else '≤'} {bound:g} {check.unit}".strip()


def markdown_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    ruler = ["---", *("---:" for _ in table.columns[1:])]
    return "\n".join([f"## {table.title}", "", line(table.columns), line(ruler), *map(line, table.rows)])


def markdown(report: Report, machine: Mapping[str, str]) -> str:
    facts = Table("Machine and settings", ["", ""], [[*pair] for pair in {**machine, **report.settings}.items()])
    tables = [*([checks_table(report.checks)] if report.checks else []), *report.tables]
    parts = [f"# {report.name}", *map(markdown_table, tables)]
    for title, lines in (("Left out", report.notes), ("Failed", report.failures)):
        if lines:
            parts.append(f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join([*parts, markdown_table(facts)]) + "\n"


def print_report(report: Report, console: Console) -> None:
    for table in [*report.tables, *([checks_table(report.checks)] if report.checks else [])]:
        shown = RichTable(title=table.title, title_justify="left")
        for index, column in enumerate(table.columns):
            shown.add_column(escape(column), justify="right" if index else "left")
        for row in table.rows:
            shown.add_row(*(f"[bold red]{cell}[/]" if cell == Verdict.MISSED.value else escape(cell) for cell in row))
        console.print(shown)
    for line in (*report.notes, *report.failures):
        console.print(f"- {escape(line)}", highlight=False)


def save(report: Report, machine: Mapping[str, str], folder: Path) -> Path:
    """Write `<date>-<tree>-<name>.md` and `.json`; a later run of the same day and tree replaces them."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{date.today().isoformat()}-{machine['tree']}-{report.name}"
    text = markdown(report, machine)
    place.with_suffix(".md").write_text(text, "utf-8")
    everything = {
        "name": report.name,
        "machine": machine,
        "settings": report.settings,
        "checks": [
            {
                "what": check.name,
                "measured": check.measured,
                "sense": check.sense,
                "must": check.must,
                "aim": check.aim,
                "unit": check.unit,
            }
            for check in report.checks
        ],
        "cells": report.raw,
        "notes": report.notes,
        "failures": report.failures,
    }
    place.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n", "utf-8")
    return place.with_suffix(".md")


def describe_machine(data: Path, systems: Sequence[System]) -> dict[str, str]:
    """Everything the figures depend on that is not a setting of the suite."""
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown: unknown")
    memory = next(line for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    facts = {
        "tree": tree(),
        "form": FORM,
        "processor": f"{cpu.split(':')[1].strip()}, {os.cpu_count()} cores",
        "memory": f"{int(memory.split()[1]) / (1 << 20):.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": file_system(data, _lines("/proc/self/mounts")),
        "python": f"{platform.python_implementation()} {platform.python_version()}, gevent {version('gevent')}",
    }
    for system in systems:
        program = system.program.name if system.program else ""
        if system.version_option and system.program and program not in facts:
            told = subprocess.run(
                [str(system.program), system.version_option], capture_output=True, text=True, timeout=10, check=False
            )
            facts[program] = (told.stdout or told.stderr).strip().splitlines()[0]
    return facts


def file_system(folder: Path, mounts: Sequence[str]) -> str:
    """Type and options of the mount that holds the folder, of lines as in /proc/self/mounts."""
    place = folder.resolve()
    fields = [line.split() for line in mounts]
    holding = [entry for entry in fields if place.is_relative_to(entry[1].replace("\\040", " "))]
    if not holding:
        return "unknown"
    # The longest mount point is the nearest; of equal ones the last mounted hides the others.
    nearest = max(enumerate(holding), key=lambda pair: (len(pair[1][1]), pair[0]))[1]
    return f"{nearest[2]} ({nearest[3]})"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
