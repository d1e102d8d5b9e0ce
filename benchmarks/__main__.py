"""`python -m benchmarks [SUITE ...]`: exit 0 = all measured and every must held, 1 = a must missed or a cell failed."""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from benchmarks.bench import Bench
from benchmarks.peers import all_systems
from benchmarks.programs import BUILD
from benchmarks.report import Report, describe_machine, print_report, save
from benchmarks.rocketmq.broker import rocketmq as rocketmq_broker
from benchmarks.suites import (
    backlog,
    client,
    connections,
    get,
    metrics,
    put,
    recovery,
    remoting,
    replication,
    rest,
    rocketmq,
    spark,
    targets,
    timers,
    transactions,
)

SUITES: dict[str, Callable[[Bench], Report]] = {
    "targets": targets.run,
    "remoting": remoting.run,
    "rocketmq": rocketmq.run,
    "transactions": transactions.run,
    "replication": replication.run,
    "metrics": metrics.run,
    "rest": rest.run,
    "timers": timers.run,
    "spark": spark.run,
    "client": client.run,
    "put": put.run,
    "get": get.run,
    "backlog": backlog.run,
    "recovery": recovery.run,
    "connections": connections.run,
}
FILE_COLUMNS = 160  # of tables printed into a file or a pipe, where rich would assume 80
RESULTS = Path(__file__).parent / "results"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("suites", nargs=-1, type=click.Choice([*SUITES, "all"]))
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of every suite, in place of its own number.")
@click.option("--quick", is_flag=True, help="Coarser grids, shorter cells, one round, a backlog of 1 million.")
@click.option(
    "--backlog",
    "backlog_messages",
    type=click.IntRange(min=1000),
    help="Messages of the smaller backlog, in place of 20 million; the larger one has five times as many.",
)
@click.option("--systems", metavar="NAME,...", help="Only these systems, such as 'metaq memory,nats jetstream'.")
@click.option(
    "--nullbroker",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="NULLBROKER",
    help="C file or program that answers puts and does nothing else (also NULLBROKER).",
)
@click.option(
    "--before",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The program metaq of an earlier version, compiled as this one: timers compares rates with it (N-22).",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Where results go.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=BUILD / "data",
    help="Where the servers keep their data: put it on the disk that you want to know about. 35 GB free.",
)
def main(
    suites: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    backlog_messages: int | None,
    systems: str | None,
    nullbroker: Path | None,
    before: Path | None,
    out: Path,
    data: Path,
) -> None:
    """Measure metaq beside its peers on this machine. Without SUITES: all of them."""
    console = Console(stderr=True)
    table_console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)
    chosen = list(SUITES) if not suites or "all" in suites else list(dict.fromkeys(suites))
    known = [*all_systems(nullbroker.resolve() if nullbroker else None), rocketmq_broker()]
    if systems is not None:
        names = {name.strip() for name in systems.split(",")}
        unknown = names - {system.name for system in known}
        if unknown:
            raise click.BadParameter(f"{', '.join(sorted(unknown))}; known: {', '.join(s.name for s in known)}")
        known = [system for system in known if system.name in names]
    _allow_open_files()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that folders and servers are cleared away
    data.mkdir(parents=True, exist_ok=True)
    _clear_abandoned(data)
    machine = describe_machine(data, known)
    held = True
    folder = data.resolve() / str(os.getpid())
    folder.mkdir()
    try:
        for name in chosen:
            console.rule(name)
            options = Bench(
                console,
                folder,
                known,
                rounds,
                quick,
                backlog=backlog_messages,
                before=before and before.absolute(),
            )
            report = SUITES[name](options)
            print_report(report, table_console)
            console.print(f"written: {save(report, machine, out).name}")
            held = held and report.held
    finally:
        shutil.rmtree(folder)
    sys.exit(0 if held else 1)


def _allow_open_files() -> None:
    """Thousands of connections need as many files, here and in the servers, which inherit the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _clear_abandoned(data: Path) -> None:
    """Delete what a run that was killed left behind: folders named by a process id that is gone."""
    for folder in data.iterdir():
        if folder.name.isdecimal() and not Path(f"/proc/{folder.name}").exists():
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
