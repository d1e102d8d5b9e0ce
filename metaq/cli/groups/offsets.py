"""``metaq offsets``: the offsets of all groups, for files and reports."""

import click

from metaq.cli.groups.offsetsexport import export
from metaq.cli.groups.offsetsreport import report


@click.group()
def offsets() -> None:
    """Keep how far all groups are, and were."""


offsets.add_command(export)
offsets.add_command(report)
