"""``metaq top``: live rates of a broker by topic and group, lag, waiting consumers, stalls and replicas."""

import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from metaq.address import Address
from metaq.cli.cluster.samples import MetricsSample, scrape
from metaq.cli.cluster.traffic import BEHIND_S, STALL_S, BrokerTraffic, TopicTraffic, broker_traffic, topic_traffic
from metaq.cli.common import AddressParameter, broker_option, command_login, examples, json_option, print_json
from metaq.cli.tables import BAD, DOUBTFUL, GOOD, print_rows
from metaq.errors import ClientError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_ENDS: Final = frozenset((b"q", b""))
"""The key that ends it, and what a terminal sends that is gone."""


@click.command(
    epilog=examples(
        "metaq top",
        "metaq top --broker 127.0.0.1:8123 --interval 5",
        "metaq top --once --json | grep orders",
    )
)
@broker_option
@click.option(
    "--http",
    type=AddressParameter(),
    help="The broker's HTTP port, as `metaq ready` shows it.  [default: the port after that of --broker]",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks, over which rates are taken.",
)
@click.option("--once", is_flag=True, help="Print one table, after one interval.")
@json_option
def top(broker: Address, http: Address | None, interval: float, once: bool, as_json: bool) -> int:
    """Show what a broker does: messages a second by topic and group, lag, consumers that wait, stalls, replicas.

    q or Ctrl-C ends it. Rates are those since the last look.
    """
    address = http or broker._replace(port=broker.port + 1)
    login = command_login().options()

    def look() -> MetricsSample:
        return scrape(address, login)

    if once or as_json:
        before = look()
        time.sleep(interval)
        _print(before, look(), as_json=as_json)
        return 0
    if not sys.stdout.isatty():
        raise click.UsageError("this needs a terminal; --once prints one table")
    _watch(look, interval, str(address))
    return 0


def _print(before: MetricsSample, now: MetricsSample, *, as_json: bool) -> None:
    whole, rows = broker_traffic(before, now), topic_traffic(before, now)
    if as_json:
        print_json(_rounded(whole._asdict()))
        for row in rows:
            print_json(_rounded(row._asdict()))
        return
    print_rows([_rounded(row._asdict()) for row in rows], as_json=False)
    click.echo(_summary(whole).plain, err=True)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with numbers that JSON has and people read."""
    return {
        name: None if value == math.inf else round(value, 3) if isinstance(value, float) else value
        for name, value in row.items()
    }


def _watch(look: Callable[[], MetricsSample], interval: float, where: str) -> None:
    """Draw again and again until a person ends it; a broker that does not answer is asked again, and said so."""
    from rich.live import Live  # noqa: PLC0415 - for a terminal only
    from rich.text import Text  # noqa: PLC0415

    try:
        with _keys() as ended, Live(Text(f"asking {where}"), screen=True, auto_refresh=False) as live:
            before: MetricsSample | None = None
            while True:
                try:
                    now = look()
                    drawn = Text(f"asking {where}") if before is None else _page(before, now)
                    before = now
                except ClientError as error:
                    drawn, before = Text(f"{error}; asking again", style=BAD), None
                live.update(drawn, refresh=True)
                if ended(interval):
                    return
    except KeyboardInterrupt:
        return


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for some seconds, and returns whether the person has ended it meanwhile.

    Keys come at once and are not shown, until the end.
    """
    if not sys.stdin.isatty():
        yield _sleep
        return
    number = sys.stdin.fileno()
    saved = termios.tcgetattr(number)

    def ended(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([number], [], [], left)[0] and os.read(number, 1) in _ENDS:
                return True
        return False

    try:
        tty.setcbreak(number)
        yield ended
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, saved)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _page(before: MetricsSample, now: MetricsSample) -> "RenderableType":
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("TOPIC", "GROUP", "IN/S", "OUT/S", "LAG", "BEHIND S", "IN FLIGHT"):
        table.add_column(Text(heading, style="bold"), justify="left" if heading in {"TOPIC", "GROUP"} else "right")
    for row in topic_traffic(before, now):
        table.add_row(*_cells(row))
    return Group(_summary(broker_traffic(before, now)), Text(), table, Text(), Text("q ends", style="dim"))


def _cells(row: TopicTraffic) -> "list[Text]":
    from rich.text import Text  # noqa: PLC0415

    behind = "" if row.behind_s is None else GOOD if row.behind_s < BEHIND_S else DOUBTFUL
    return [
        Text("" if row.group else row.topic),
        Text(row.group),
        Text("" if row.in_per_s is None else f"{row.in_per_s:,.1f}"),
        Text(f"{row.out_per_s:,.1f}"),
        Text("" if row.lag is None else f"{row.lag:,}", style=behind),
        Text("" if row.behind_s is None else f"{row.behind_s:,.1f}", style=behind),
        Text("" if row.in_flight is None else f"{row.in_flight:,}"),
    ]


def _summary(whole: BrokerTraffic) -> "Text":
    """Return the broker in one line; what is wrong has a colour."""
    from rich.text import Text  # noqa: PLC0415

    stall = whole.longest_stall_s
    stalls = f"stalls ≤ {stall:g} s" if stall < math.inf else "stalls of many seconds"
    lacks_replicas = whole.role == "master" and whole.in_sync < whole.min_in_sync
    words = [
        (whole.role, ""),
        ("writable", GOOD) if whole.writable else ("not writable", DOUBTFUL if whole.role == "slave" else BAD),
        (f"in {whole.in_per_s:,.1f}/s", ""),
        (f"out {whole.out_per_s:,.1f}/s", ""),
        (f"held pulls {whole.held_pulls:,}", ""),
        (f"connections {whole.connections:,}", ""),
        (stalls if stall else "no stall", DOUBTFUL if stall > STALL_S else ""),
        (f"replicas in sync {whole.in_sync} (needed {whole.min_in_sync})", BAD if lacks_replicas else ""),
        (f"replica lag {whole.replica_lag_bytes:,} bytes", ""),
    ]
    return Text("  ").join(Text(text, style=style) for text, style in words)
