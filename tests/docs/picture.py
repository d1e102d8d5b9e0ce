"""The picture docs/images/offset-report.png, of a report on the planted history: ``python -m tests.docs.picture``.

It needs Java and Chromium with fonts, so that no test compares it.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from metaq.spark.report.history import read_files
from metaq.spark.report.report import PAGE, SETTINGS, Job, report
from metaq.spark.session import session
from tests.docs.examples import ROOT
from tests.spark.planted import plant

PICTURE: Final = ROOT / "docs" / "images" / "offset-report.png"
WINDOW: Final = "1240,1660"
"""The head, the findings, the groups and the first chart."""


def main() -> None:
    """Make the picture, in place of the one that is there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spark = session("metaq offset report", settings=SETTINGS)
        try:
            report(read_files(spark, str(plant(folder))), Job(out=str(folder)))
        finally:
            spark.stop()
        made = folder / "made.png"
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WINDOW}"]
        command += [f"--user-data-dir={folder / 'browser'}", f"--screenshot={made}", (folder / PAGE).as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        shutil.copyfile(made, PICTURE)


if __name__ == "__main__":
    main()
