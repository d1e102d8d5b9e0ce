"""The printing of findings."""

from collections.abc import Iterable

from metaq.cli.tables import print_record, print_rows
from metaq.diagnosis.findings import Finding, Level


def print_findings(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print all findings. Return the exit code."""
    listed = list(findings)
    rows = [{**finding._asdict(), "level": finding.level.name.lower()} for finding in listed]
    if as_json:
        for row in rows:
            print_record(row, as_json=True)
    else:
        print_rows(
            [
                {
                    "level": row["level"],
                    "check": row["check"],
                    "found": f"{row['found']} → {row['advice']}" if row["advice"] else row["found"],
                }
                for row in rows
            ],
            as_json=False,
        )
    return max((finding.level for finding in listed), default=Level.OK).value
