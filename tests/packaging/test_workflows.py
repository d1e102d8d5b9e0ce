"""The workflows and templates of the repository, as far as they can be tried without the service that runs them.

What they call is there, and is allowed no more than it needs. Not tried: the actions of others, the machines, and publishing.
"""

import io
import re
import shlex
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import metaq
from tests.docs.examples import ROOT
from tests.packaging.conftest import Bare
from tests.packaging.release import main, problems

WORKFLOWS: Final = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS: Final = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
REPOSITORY: Final = re.findall(r'^REPOSITORY = "(.+)"$', (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE)[0]
PACKAGES: Final = [path.parent.relative_to(ROOT) for path in ROOT.glob("integrations/*/pyproject.toml")]
MADE: Final = ("dist/", ".venv/", "$")
"""What a command makes, or the machine has."""
HOME: Final = "https://example.com/metaq"


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.load(file.read_text("utf-8"), yaml.BaseLoader)
    return content


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", [])


def commands() -> list[list[str]]:
    """The words of each command that a workflow runs."""
    lines = [line for file in WORKFLOWS for step in steps(read(file)) for line in step.get("run", "").splitlines()]
    return [shlex.split(line) for line in lines]


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w./-]+):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_the_targets_that_workflows_make_are_there() -> None:
    """SG-137: of the Makefile."""
    made = {word for command in commands() if command[0] == "make" for word in command[1:]}
    assert made and made <= make_targets()


def test_the_files_and_modules_that_workflows_name_are_there() -> None:
    """SG-137: of this tree; what a step before has made is not looked for."""
    words = [word for command in commands() for word in command if "/" in word and "@" not in word and not word.startswith("-")]
    files = [word for word in words if not word.startswith(MADE)]
    assert files and [file for file in files if not (ROOT / file).exists()] == []
    modules = [command[command.index("-m") + 1] for command in commands() if "-m" in command]
    ours = [module for module in modules if module.startswith(("tests.", "metaq"))]
    assert ours and [module for module in ours if not (ROOT / f"{module.replace('.', '/')}.py").is_file()] == []


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_the_jobs_of_a_workflow_fit_together(file: Path) -> None:
    """SG-137: a job needs jobs and calls workflows that are there, ends some time, and reads what its matrix has."""
    workflow = read(file)
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in jobs.items():
        needed = job.get("needs", [])
        assert ({needed} if isinstance(needed, str) else set(needed)) <= jobs.keys(), name
        if "uses" in job:
            assert "workflow_call" in read(ROOT / job["uses"])["on"]
            continue
        assert int(job["timeout-minutes"]) <= 360, name
        assert all(("run" in step) != ("uses" in step) for step in job["steps"]), name
        assert set(re.findall(r"matrix\.(\w+)", str(job))) == job.get("strategy", {"matrix": {}})["matrix"].keys(), name


def test_all_interpreters_of_the_wheels_are_tested() -> None:
    """SG-137: the oldest by everything, the others by the fast tests."""
    jobs = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    (oldest,) = re.findall(r"^python:(3\.\d+)-", jobs["everything"]["container"])
    wheels = re.findall(r'"cp3(\d+)-\*"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert [oldest, *jobs["interpreters"]["strategy"]["matrix"]["python"]] == [f"3.{minor}" for minor in wheels]


def test_a_release_needs_the_tests_and_only_its_last_steps_may_write() -> None:
    """SG-137: by trusted publishing, without a secret."""
    file = ROOT / ".github" / "workflows" / "release.yml"
    release = read(file)
    assert release["on"] == {"push": {"tags": ["v*"]}}
    assert set(release["jobs"]["publish"]["needs"]) == {"ci", "pure", "compiled"}
    allowed = {name: job["permissions"] for name, job in release["jobs"].items() if "permissions" in job}
    assert allowed == {"publish": {"id-token": "write"}, "page": {"contents": "write"}}
    assert "secrets." not in file.read_text("utf-8")
    artifacts = {step["with"]["name"] for step in steps(release) if step.get("uses", "").startswith("actions/upload-artifact@")}
    assert artifacts == {"dist-pure", "dist-${{ matrix.runner }}", "sbom"}


# -- what is released -------------------------------------------------------------------------------------------------


def sdist(folder: Path, heading: str, distribution: str = "metaq-broker") -> Path:
    """The files of an sdist that the check reads."""
    texts = {
        "PKG-INFO": f"Metadata-Version: 2.4\nName: {distribution}\nVersion: 1.2.3\nHome-page: {HOME}\n",
        "CHANGELOG.md": f"# Changes\n\n{heading}\n",
    }
    file = folder / f"{distribution}-1.2.3.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for name, text in texts.items():
            entry = tarfile.TarInfo(f"{distribution}-1.2.3/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return file


@pytest.mark.parametrize(
    ("tag", "repository", "heading", "expected"),
    [
        ("v1.2.3", HOME, "## [1.2.3] - 2026-12-01", []),
        ("v1.2.4", HOME, "## [1.2.3] - 2026-12-01", ["the tag is v1.2.4 and the version of metaq-broker 1.2.3"]),
        ("1.2.3", HOME, "## [1.2.3] - 2026-12-01", ["the tag is 1.2.3 and the version of metaq-broker 1.2.3"]),
        ("v1.2.3", f"{HOME}s", "## [1.2.3] - 2026-12-01", ["set REPOSITORY in setup.py"]),
        ("v1.2.3", HOME, "## [1.2.3] - unreleased", ["CHANGELOG.md has no line"]),
        ("v1.2.3", HOME, "## [1.2.30] - 2026-12-01", ["CHANGELOG.md has no line"]),
    ],
)
def test_only_what_fits_its_tag_is_released(
    tmp_path: Path, tag: str, repository: str, heading: str, expected: list[str]
) -> None:
    """SG-137: the version, the repository, and the day in the list of changes."""
    found = problems(sdist(tmp_path, heading), tag, repository)
    assert len(found) == len(expected)
    assert all(part in problem for part, problem in zip(expected, found, strict=True))


def test_a_package_of_a_framework_is_released_under_the_version_of_metaq(tmp_path: Path) -> None:
    """SG-137: a tag that is not its version stops the release."""
    sdist(tmp_path, "## [1.2.3] - 2026-12-01")
    sdist(tmp_path, "", "metaq-kombu")
    main(str(tmp_path), "v1.2.3", HOME)
    with pytest.raises(SystemExit, match=r"the version of metaq-kombu 1\.2\.3: .* set it in integrations/"):
        main(str(tmp_path), "v1.2.4", HOME)


def test_a_release_builds_the_package_of_each_framework() -> None:
    """SG-137: as a dry run of its command shows."""
    assert ["make", "dist"] in commands()
    shown = subprocess.check_output(["make", "--dry-run", "dist"], cwd=ROOT, text=True)
    (built,) = re.findall(r"for package in (.+?);", shown)
    assert set(built.split()) == {".", *map(str, PACKAGES)}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_the_package_of_a_framework_has_the_version_of_metaq_and_requires_its_minor_version(package: Path) -> None:
    """SG-137: it may not fit the next one."""
    files = [ROOT / package / "pyproject.toml", *(ROOT / package).glob("*/version.py")]
    version = re.compile(r'^(?:version|__version__: Final) = "(.+)"$', re.MULTILINE)
    assert [found for file in files for found in version.findall(file.read_text("utf-8"))] == [metaq.__version__]
    major, minor, _ = metaq.__version__.split(".")
    required = tomllib.loads(files[0].read_text("utf-8"))["project"]["dependencies"]
    assert f"metaq-broker>={major}.{minor},<{major}.{int(minor) + 1}" in required


@pytest.mark.slow
@pytest.mark.partner("git")
def test_this_distribution_fits_the_tag_of_its_version(bare: Bare) -> None:
    """SG-137: what may be left to do is the day in the list of changes."""
    found = problems(bare.sdist, f"v{metaq.__version__}", REPOSITORY)
    assert [problem for problem in found if not problem.startswith("CHANGELOG.md")] == []


# -- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [file for file in FORMS if file.stem != "config"], ids=lambda file: file.name)
def test_a_form_has_what_the_service_asks_for(file: Path) -> None:
    """SG-137: a name, and parts of known kinds with a label each."""
    form = read(file)
    assert form["name"] and form["description"]
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in questions} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({part["id"] for part in questions}) == len(questions) > 1
    assert all(part["attributes"]["label"] for part in questions)
    assert any(part.get("validations") == {"required": "true"} for part in questions)
    named = re.findall(r"\b(?:docs/)?[\w-]+\.md\b", file.read_text("utf-8"))
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_who_chooses_no_form_is_led_to_what_is_there() -> None:
    """SG-137: a vulnerability is not for a form."""
    (link,) = read(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]
    page = link["url"].removeprefix(f"{REPOSITORY}/blob/main/")
    assert page == "SECURITY.md" and (ROOT / page).is_file()
