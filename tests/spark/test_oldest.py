"""The oldest PySpark that setup.py allows: all other tests run with the newest.

pip keeps the wheel that it builds, 400 MB, so only the first run on a machine downloads it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import ROOT
from tests.spark.topics import clients
from tests.support.broker import BrokerProcess
from tests.support.jvms import HOME, make_home

MESSAGES: Final = 25
INSTALL_S: Final = 600.0
RUN_S: Final = 240.0


def oldest() -> str:
    found = re.search(r'"pyspark>=([0-9.]+)"', (ROOT / "setup.py").read_text("utf-8"))
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the oldest PySpark, to be put before the packages of this environment."""
    folder = tmp_path_factory.mktemp("oldest")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(folder)]
    done = subprocess.run([*command, f"pyspark=={oldest()}.*"], capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"needs PySpark {oldest()}, and pip cannot install it: {done.stderr[-300:]}")
    return folder


@pytest.mark.slow
@pytest.mark.partner("java")
@pytest.mark.timeout(INSTALL_S + RUN_S + 60)
def test_the_oldest_pyspark_reads_streams_writes_and_reports(installed: Path, tmp_path: Path) -> None:
    """P47, P18: what it lacks is refused with both versions, all the rest works."""
    with BrokerProcess(tmp_path / "data") as broker:
        with clients(broker) as (client, text):
            client.admin().create_topic("t", 2)
            for partition in (0, 1):
                text.put_many("t", [b"%d" % number for number in range(10)], partition=partition)
        environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}", "SPARK_LOCAL_IP": "127.0.0.1"}
        environment[HOME] = str(make_home(tmp_path / "spark", installed / "pyspark"))
        command = [sys.executable, "-m", "tests.spark.oldest_driver", broker.registry, str(tmp_path), str(MESSAGES)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith(f"{oldest()}.")
    there = sorted(str(number) for number in [*range(10), *range(10)])
    assert found["read"] == found["copied"] == there
    assert found["columns"][-2:] == ["headers", "error"]
    assert "filterPushdown: Spark passes filters to readers, from PySpark 4.1 on; this is 4.0" in found["filtered"]
    assert found["batches"][:3] == [7, 7, 7]
    assert sum(found["batches"]) == MESSAGES, "the rest did not wait for more than a second"
    assert found["copied later"] == sorted([*there, *(str(number) for number in range(MESSAGES))])
    assert found["findings"] == ["retention", "skew", "stuck", "unowned"]
