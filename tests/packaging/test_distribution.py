"""From nothing to the first message: the distribution is built, installed in a fresh environment, and serves."""

import email
import re
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import metaq
from tests.docs.examples import ROOT
from tests.packaging.built import MOST_KIB, build_compiled, install, run, serving, tracked

pytestmark = [pytest.mark.slow, pytest.mark.partner("git"), pytest.mark.timeout(2400)]


class Built(NamedTuple):
    sdist: Path
    wheel: Path
    binaries: Path
    """Of the environment with the wheel."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The compiled form."""
    sdist, wheel = build_compiled()
    return Built(sdist, wheel, install(wheel, tmp_path_factory.mktemp("distribution") / "environment"))


def compiled_modules() -> set[str]:
    """What setup.py lists, without the suffix."""
    return set(re.findall(r'^    "(metaq/.+)\.py",$', (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE))


def test_from_nothing_to_the_first_message(built: Built, tmp_path: Path) -> None:
    """P15, SG-137: no configuration, no other server, at most 60 MB resident; SIGTERM ends it in order."""
    with serving(built.binaries, tmp_path / "empty") as broker:
        first = run(built.binaries / "metaq", "put", "hello", "world", "--broker", broker.address, cwd=tmp_path)
        assert first.startswith("stored in hello-0 at 0")
        assert run(built.binaries / "metaq", "get", "hello", "--broker", broker.address, cwd=tmp_path) == "world\n"
        resident = broker.resident_kib()
        broker.process.terminate()
        assert broker.process.wait(60) == 0
    print(f"resident {resident} KiB")
    assert resident <= MOST_KIB
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"data", "out", "err"}


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    """SG-137: every module that is tracked, the mark of types, the licence, extensions of the hot modules; no tests."""
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        metadata = email.message_from_bytes(wheel.read(f"metaq_broker-{metaq.__version__}.dist-info/METADATA"))
    inside = {name for name in names if ".dist-info/" not in name}
    extensions = {name for name in inside if name.endswith(".so")}
    assert inside - extensions == {*(name for name in tracked() if name.startswith("metaq/")), "pyspark_metaq.py"}
    shared = {"metaq/compiled__mypyc", "metaq/compiled_client__mypyc"}
    assert {name.partition(".")[0] for name in extensions} == compiled_modules() | shared
    assert any(name.endswith((".dist-info/licenses/LICENSE", ".dist-info/LICENSE")) for name in names)
    assert (metadata["Name"], metadata["Version"]) == ("metaq-broker", metaq.__version__)
    assert metadata["License"] == "Apache-2.0" or metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"deploy", "zookeeper", "spark", "transaction", "report"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_sdist_holds_what_the_wheel_is_made_of(built: Built) -> None:
    """SG-137: and the documents; the wheel of the fixture was made of it."""
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    made_of = {
        "setup.py",
        "build_metaq.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "conf/broker.yaml",
        "docs/events.md",
    }
    works_with = {"fabfile.py", "conf/cluster.yaml", "docs/metaq-grafana.json", "Containerfile", ".dockerignore"}
    works_with |= {"compose.yaml", "deploy/compose/prometheus.yaml", "CONTRIBUTING.md", "SECURITY.md"}
    works_with |= {name for name in tracked() if name.startswith("deploy/helm/")}
    assert made_of | works_with <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", ".venv", "data/"))]


def test_the_installed_command_is_this_version(built: Built, tmp_path: Path) -> None:
    """SG-137: and its modules are those of the environment, not of this project."""
    assert run(built.binaries / "metaq", "--version", cwd=tmp_path) == f"metaq {metaq.__version__} (compiled)\n"
    place = run(built.binaries / "python", "-c", "import metaq; print(metaq.__file__)", cwd=tmp_path)
    assert Path(place).is_relative_to(built.binaries.parent)
    assert "No module named" not in run(built.binaries / "metaq", "doctor", "--help", cwd=tmp_path)


def test_bash_completes(built: Built, tmp_path: Path) -> None:
    """E-04: commands, their sub-commands and flags, in the way that docs/cli.md shows."""
    script = run(built.binaries / "metaq", cwd=tmp_path, _METAQ_COMPLETE="bash_source")
    (tmp_path / "completion.bash").write_text(script)

    def complete(*words: str) -> set[str]:
        typed = " ".join(f"'{word}'" for word in words)
        code = f"source completion.bash; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _metaq_completion metaq; "
        path = f"{built.binaries}:/usr/bin:/bin"
        return set(run("bash", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"', cwd=tmp_path, PATH=path).split())

    assert complete("metaq", "do") == {"doctor"}
    assert {"create", "list", "delete"} <= complete("metaq", "topic", "")
    assert complete("metaq", "serve", "--max-top") == {"--max-topics"}
