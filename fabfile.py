"""Deploy and operate the machines of conf/cluster.yaml: ``fab --list``, docs/operations.md."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from invoke.exceptions import Exit
from invoke.tasks import task

from metaq.deploy import tasks
from metaq.deploy.cluster import Cluster
from metaq.errors import MetaqError

CLUSTER = "conf/cluster.yaml"


@contextmanager
def read(cluster: str) -> Iterator[Cluster]:
    """Read the cluster; an error ends fab with its reason and exit code 1."""
    try:
        yield Cluster.read(Path(cluster))
    except MetaqError as error:
        raise Exit(f"metaq: {error}", 1) from error


def say(line: str) -> None:
    print(line, flush=True)


@task
def deploy(context: Any, cluster: str = CLUSTER, dry_run: bool = False) -> None:
    """Install the package on all hosts and run it; --dry-run shows what would be done."""
    with read(cluster) as found:
        tasks.deploy(found, say, dry_run=dry_run)


@task
def rollback(context: Any, cluster: str = CLUSTER, to: str = "") -> None:
    """Go back to the previous release, or --to RELEASE."""
    with read(cluster) as found:
        tasks.rollback(found, say, to=to)


@task(name="upgrade-check")
def upgrade_check(context: Any, cluster: str = CLUSTER) -> None:
    """Show what a deploy would change, and what prevents it."""
    with read(cluster) as found:
        tasks.upgrade_check(found, say)


@task
def start(context: Any, cluster: str = CLUSTER, on: str = "") -> None:
    """Start the services that do not run, on all hosts or --on HOST,HOST."""
    with read(cluster) as found:
        tasks.start(found, say, found.only(on))


@task
def stop(context: Any, cluster: str = CLUSTER, on: str = "") -> None:
    """Stop the services, on all hosts or --on HOST,HOST."""
    with read(cluster) as found:
        tasks.stop(found, say, found.only(on))


@task
def restart(context: Any, cluster: str = CLUSTER) -> None:
    """Restart everything one at a time: slaves first, masters after they have handed over."""
    with read(cluster) as found:
        tasks.restart(found, say)


@task
def status(context: Any, cluster: str = CLUSTER, on: str = "") -> None:
    """Show the services on each host and their state; exit code 1 unless all is well."""
    with read(cluster) as found:
        if not tasks.status(found, say, found.only(on)):
            raise Exit(code=1)


@task
def logs(context: Any, cluster: str = CLUSTER, on: str = "", lines: int = 20) -> None:
    """Print the last --lines of the logs, of all hosts or --on HOST,HOST."""
    with read(cluster) as found:
        tasks.logs(say, found.only(on), lines)
