"""The Python examples of docs/spark.md do what the document shows."""

import os
import re
import subprocess
import sys
from typing import Final

import pytest

from metaq.spark.reading.options import READING
from metaq.spark.writing.sink import OF_SPARK, WRITING
from tests.docs.examples import ROOT, fences
from tests.support.broker import BrokerProcess

DOCUMENT: Final = "docs/spark.md"
ADDRESS: Final = "127.0.0.1:9876"
DEADLINE_S: Final = 600.0


@pytest.mark.slow
@pytest.mark.partner("java")
@pytest.mark.timeout(DEADLINE_S)
def test_the_examples_one_after_the_other(broker: BrokerProcess) -> None:
    """P47: as one program, beside the broker's folder; it prints what is shown."""
    shown = [fence for fence in fences(DOCUMENT) if fence.kind in {"python", "text"}]
    program = "\n".join(fence.text for fence in shown if fence.kind == "python")
    assert program.count(ADDRESS) == 2
    environment = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program.replace(ADDRESS, broker.registry)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=DEADLINE_S,
        env={**environment, "SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=broker.data.parent,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "".join(fence.text for fence in shown if fence.kind == "text")), done.stderr


def test_every_option_is_in_the_table() -> None:
    """P47: with no option that does not exist."""
    options = (ROOT / DOCUMENT).read_text("utf-8").partition("## Options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", options, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert named == {*READING, *WRITING} - {*OF_SPARK}
