"""The Java and Go examples of docs/clients.md do what it shows; tests/docs/test_clients.py does the same for Python."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
import trustme

from tests.docs.examples import fences
from tests.interop.clients import GO, JAVA, java_flags, run_build
from tests.support.broker import BrokerProcess

DOCUMENT: Final = "docs/clients.md"
ADDRESS: Final = "127.0.0.1:9876"
AUTHORITY: Final = "/etc/metaq/ca.pem"
DEADLINE_S: Final = 120.0

pytestmark = pytest.mark.timeout(900)


def only(kind: str) -> str:
    """The document's one fence of that kind."""
    (fence,) = fences(DOCUMENT, kind)
    return fence.text


def examples(kind: str) -> list[tuple[str, str]]:
    """The document's programs of that kind, each with the output shown behind it."""
    found = fences(DOCUMENT)
    pairs = [(fence, found[place + 1]) for place, fence in enumerate(found) if fence.kind == kind]
    assert pairs and all(output.kind == "text" for _, output in pairs), "no program, or one without its output"
    return [(program.text, output.text) for program, output in pairs]


def run(command: Sequence[str], home: Path) -> str:
    """Return what the program prints; its client keeps its files in ``home``."""
    log = home / "stderr.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=home, env=os.environ | {"HOME": str(home)}, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
        )
    with process:
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:  # a Java program whose main thread failed goes on
            process.kill()
            output, _ = process.communicate()
    assert process.returncode == 0, output + log.read_text("utf-8", errors="replace")
    return output


def run_java(home: Path, registry: str, *properties: str) -> None:
    for program, output in examples("java"):
        name = re.search(r"^public class (\w+)", program, re.MULTILINE)
        assert name is not None
        source = home / f"{name[1]}.java"
        source.write_text(program.replace(ADDRESS, registry), "utf-8")
        assert run(["java", f"-Duser.home={home}", *properties, *java_flags(), str(source)], home) == output


@pytest.mark.slow
@pytest.mark.partner("java", "mvn")
def test_java(tmp_path: Path) -> None:
    """RD-016, RD-017, RD-105, SG-119, SG-131: the programs run as they stand, and print what is shown."""
    with BrokerProcess(tmp_path / "data") as broker:
        run_java(tmp_path, broker.registry)


@pytest.mark.slow
@pytest.mark.partner("java", "mvn")
def test_java_with_tls(tmp_path: Path) -> None:
    """RD-021, RD-024: the same with compact headers, and the properties shown; the certificate is checked."""
    authority = trustme.CA()
    trusted, chain = tmp_path / "ca.pem", tmp_path / "chain.pem"
    authority.cert_pem.write_to_path(str(trusted))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(chain))
    shown = only("properties")
    assert AUTHORITY in shown
    properties = [f"-D{line}" for line in shown.replace(AUTHORITY, str(trusted)).splitlines()]
    with BrokerProcess(tmp_path / "data", "--tls-certificate", str(chain)) as broker:
        run_java(tmp_path, broker.registry, "-Drocketmq.serialize.type=ROCKETMQ", *properties)


@pytest.mark.partner("go")
def test_go(tmp_path: Path) -> None:
    """RD-016, RD-017, SG-119, SG-131: the program runs as it stands, and prints what is shown."""
    ((program, output),) = examples("go")
    module = tmp_path / "module"
    module.mkdir()
    for name in ("go.mod", "go.sum"):
        shutil.copy(GO / name, module)
    with BrokerProcess(tmp_path / "data") as broker:
        (module / "main.go").write_text(program.replace(ADDRESS, broker.registry), "utf-8")
        run_build(["go", "build", "-buildvcs=false", "-o", "quickstart", "."], module)
        assert run([str(module / "quickstart")], tmp_path) == output


def test_the_versions_shown_are_those_tested() -> None:
    """The document names the versions that all tests of these clients run."""
    tested = re.search(r"<rocketmq.version>(.+)</rocketmq.version>", (JAVA / "pom.xml").read_text("utf-8"))
    assert tested is not None
    assert f"<version>{tested[1]}</version>" in only("xml")
    module, version = only("sh").removeprefix("go get ").strip().split("@")
    assert f"require {module} {version}\n" in (GO / "go.mod").read_text("utf-8")
