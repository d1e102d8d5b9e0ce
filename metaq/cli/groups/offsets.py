"""``metaq offsets``: the offsets of all groups, for files and reports."""

import click

from metaq.cli.groups.offsetsexport import export
from metaq.cli.groups.offsetsreport import report
from metaq.cli.suggestions import Suggesting


@click.group(cls=Suggesting)
def offsets() -> None:
    """Export the offsets of all groups, now and in the past, and report on them."""


offsets.add_command(export)
offsets.add_command(report)
