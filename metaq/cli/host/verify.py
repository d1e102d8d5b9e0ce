"""``metaq verify``: check a data folder that no broker uses, or rebuild what is derived in it."""

import dataclasses
from pathlib import Path

import click

from metaq.cli.common import FAILED, examples, json_option, print_json
from metaq.cli.progress import progress
from metaq.store.recovery.verify import repair as repair_store
from metaq.store.recovery.verify import verify as verify_store
from metaq.timers.inspecting import TimerInspection


@click.command(epilog=examples("metaq verify data", "metaq verify data --repair"))
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option("--repair", is_flag=True, help="Rebuild everything that derives from the commit log. The log is not changed.")
@json_option
def verify(directory: Path, repair: bool, as_json: bool) -> int:
    """Check a data folder, or repair it.

    Checks every record, unit and position in DIR, which no broker may use meanwhile. Prints file, offset and kind of each
    damage, and ends with exit code 1 if there is any.
    """
    check = repair_store if repair else verify_store
    with progress("repairing" if repair else "checking", "bytes") as bar:
        report = check(
            directory,
            progress=lambda done, total: bar.reach(done, done / total if total else None),
            inspect=TimerInspection().record,
        )
    damages = [{"file": str(path), "offset": offset, "damage": text} for path, offset, text in report.damages]
    if as_json:
        print_json({**dataclasses.asdict(report), "directory": str(directory), "damages": damages})
    else:
        for damage in damages:
            click.echo("{file} {offset}: {damage}".format(**damage))
        quarantined = f", {report.quarantined_bytes} bytes in quarantine" if report.quarantined_bytes else ""
        if report.dropped:
            quarantined += f" with {report.dropped} intact records of incomplete groups"
        checked = f"checked {report.records} records, {report.units} units, {report.documents} documents{quarantined}"
        click.echo(f"{checked}: {len(damages) or 'no'} damage{'s' if len(damages) > 1 else ''}", err=bool(damages))
    if not report.owner_known:
        found = f"{directory} has no store.json that can be read, so whose folder it is is not known"
        advice = "the next broker that starts on it makes it its own: check its broker_name and broker_number first"
        click.echo(f"metaq: {found}; {advice}", err=True)
    return FAILED if damages else 0
