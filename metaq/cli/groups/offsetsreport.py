"""``metaq offsets report``, which starts the Spark job that makes the report, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click

from metaq.cli.common import FAILED, PASSWORD_VARIABLE, command_login, examples, json_option, registry_option
from metaq.cli.doctor.findings import Finding, Level, print_findings
from metaq.cli.numbers import IntRange
from metaq.message import HISTORY_TOPIC

PAGE: Final = "report.html"
_TOLD: Final = 2
"""Exit code of a job whose last line is the error."""
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
    command = _command("report", {**job, **source})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        said = done.stderr.splitlines()[-1 if done.returncode == _TOLD else -_SHOWN_LINES :]
        click.echo("\n".join(["metaq: " + line for line in said]), err=True)
        return FAILED
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if as_json:
        click.echo(done.stdout, nl=False)
    elif rows:
        levels = (Level[row["severity"].upper()] for row in rows)
        findings = [
            Finding(level, row["kind"], row["sentence"], row["advice"]) for level, row in zip(levels, rows, strict=True)
        ]
        print_findings(findings, as_json=False)
    click.echo(f"wrote {out / PAGE}", err=as_json)
    return 0


def _command(module: str, job: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", f"metaq.spark.report.{module}", json.dumps(job)]


def _follow(watch: dict[str, Any], environment: dict[str, str]) -> int:
    """Run the job that follows. Its output goes straight to the terminal, or to the log of its service manager."""
    return FAILED if subprocess.run(_command("alarms", watch), env=environment, check=False).returncode != 0 else 0  # noqa: S603
