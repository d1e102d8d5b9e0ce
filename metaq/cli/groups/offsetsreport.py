"""``metaq offsets report``, which starts the Spark job that makes the report, in a process of its own."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import click

from metaq.cli.common import FAILED, PASSWORD_VARIABLE, command_login, examples, json_option, registry_option
from metaq.cli.doctor.findings import print_findings
from metaq.cli.numbers import IntRange
from metaq.cli.progress import progress
from metaq.diagnosis.findings import Finding, Level
from metaq.message import HISTORY_TOPIC

PAGE: Final = "report.html"
_TOLD: Final = 2
"""Exit code of a job whose last line is the error."""
_STEP: Final = re.compile(r"step (\d+) of (\d+)\n")
"""A line by which a job says how far it is, on standard error."""
_SHOWN_LINES: Final = 20
"""Lines shown of a stack trace, which may have thousands."""


@click.command(
    epilog=examples(
        "metaq offsets report --out report",
        "metaq offsets report --history week.parquet --out report --png",
        "metaq offsets report --out report --follow --alarms alarms",
    )
)
@click.option(
    "--history",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="A file or folder from metaq offsets export. By default, what the brokers have recorded.",
)
@click.option("--topic", default=HISTORY_TOPIC, show_default=True, metavar="TOPIC", help="The topic with the brokers' history.")
@registry_option
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="The folder to write to."
)
@click.option("--png", is_flag=True, help="Also write the charts as pictures; needs metaq-broker[report].")
@click.option(
    "--stuck-samples",
    type=IntRange(2),
    default=10,
    show_default=True,
    metavar="N",
    help="A partition in which nothing has moved for N samples is stuck.",
)
@click.option(
    "--risk-hours",
    type=click.FloatRange(0, min_open=True),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Messages that retention deletes unconsumed within this time are at risk.",
)
@click.option("--follow", is_flag=True, help="Keep the report current, until Ctrl-C.")
@click.option("--alarms", metavar="TOPIC", help="With --follow: send a message for each finding that comes or goes.")
@click.option(
    "--every",
    type=click.FloatRange(1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="With --follow: time between two reports.",
)
@json_option
def report(
    history: Path | None,
    topic: str,
    registry: str,
    out: Path,
    png: bool,
    stuck_samples: int,
    risk_hours: float,
    follow: bool,
    alarms: str | None,
    every: float,
    as_json: bool,
) -> int:
    """Write a report on the history of offsets into DIR: a page, its tables as Parquet, its charts as pictures.

    It shows which groups are stuck, fall behind, have partitions without an owner or will lose messages to retention, and which
        topics are skewed. Needs Spark (pip install 'metaq-broker[spark]') and Java.
    """
    if alarms is not None and not follow:
        raise click.UsageError("--alarms needs --follow")
    if follow and history is not None:
        raise click.UsageError("--follow reads what brokers record; it cannot be combined with --history")
    job = {"out": str(out), "pictures": png, "stuck_samples": stuck_samples, "risk_hours": risk_hours}
    source: dict[str, Any] = {"history": str(history)}
    environment = dict(os.environ)
    if history is None:
        who = command_login().options()
        source = {"servers": registry, "topic": topic, "user": who["user"], "tls_ca": who["tls"] or ""}
        environment[PASSWORD_VARIABLE] = who["password"]  # other users of a machine see arguments, but no environment
    if follow:
        return _follow({**job, **source, "alarms": alarms, "every_s": every}, environment)
    code, printed, said = _run(_command("report", {**job, **source}), environment)
    if code != 0:
        shown = said[-1 if code == _TOLD else -_SHOWN_LINES :]
        click.echo("\n".join(["metaq: " + line for line in shown]), err=True)
        return FAILED
    rows = [json.loads(line) for line in printed.splitlines()]
    if as_json:
        click.echo(printed, nl=False)
    elif rows:
        levels = (Level[row["severity"].upper()] for row in rows)
        findings = [
            Finding(level, row["kind"], row["sentence"], row["advice"]) for level, row in zip(levels, rows, strict=True)
        ]
        print_findings(findings, as_json=False)
    click.echo(f"wrote {out / PAGE}", err=as_json)
    return 0


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str, list[str]]:
    """Run a job and show its progress. Return its exit code, its standard output, and what else it said, as lines."""
    said: list[str] = []
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as printed,
        progress("reporting", "steps") as bar,
        subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.PIPE, text=True) as job,  # noqa: S603
    ):
        assert job.stderr is not None
        try:
            for line in job.stderr:
                if step := _STEP.fullmatch(line):
                    bar.reach(int(step[1]), int(step[1]) / int(step[2]))
                else:
                    said.append(line.rstrip("\n"))
            job.wait()
        except BaseException:  # Ctrl-C: Spark would go on
            job.kill()
            raise
        printed.seek(0)
        return job.returncode, printed.read(), said


def _command(module: str, job: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", f"metaq.spark.report.{module}", json.dumps(job)]


def _follow(watch: dict[str, Any], environment: dict[str, str]) -> int:
    """Run the job that follows. Its output goes straight to the terminal, or to the log of its service manager."""
    return FAILED if subprocess.run(_command("alarms", watch), env=environment, check=False).returncode != 0 else 0  # noqa: S603
