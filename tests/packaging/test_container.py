"""The Containerfile, as far as it can be tried without a container engine: its commands, run in plain folders.

Not tried: the base images, `useradd`, and that the folder /data is writable for the user.
"""

import fnmatch
import json
import shlex
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from metaq.cli.common import DEFAULT_BROKER
from metaq.config import Settings, gather_settings
from metaq.fields import from_values
from tests.docs.examples import ROOT
from tests.packaging.built import DEADLINE_S, clean_environment, copy, run, tracked
from tests.support.broker import wait_until
from tests.support.ports import free_ports

pytestmark = [pytest.mark.partner("git"), pytest.mark.timeout(2400)]


class Instruction(NamedTuple):
    name: str
    text: str


def read(file: Path) -> list[Instruction]:
    """The instructions: comments left out, continued lines joined."""
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [Instruction(*line.split(None, 1)) for line in whole if line.strip()]


INSTRUCTIONS: Final = read(ROOT / "Containerfile")
AT: Final = [at for at, instruction in enumerate(INSTRUCTIONS) if instruction.name == "FROM"][-1]
IMAGE: Final = {name: text for name, text in INSTRUCTIONS[AT:] if name != "RUN"}
ENVIRONMENT: Final = dict(word.split("=", 1) for word in shlex.split(IMAGE["ENV"]))
(BUILD,) = (text for name, text in INSTRUCTIONS[:AT] if name == "RUN")
(INSTALL,) = (text for name, text in INSTRUCTIONS[AT:] if name == "RUN")


def context() -> list[str]:
    """The tracked files that `.dockerignore` lets in."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and not line.startswith("#")]
    assert patterns[0] == "*"
    wanted = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    unwanted = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    let_in = [name for name in tracked() if name in wanted or name.partition("/")[0] in wanted]
    return [name for name in let_in if not any(fnmatch.fnmatch(name, f"*{pattern}") for pattern in unwanted)]


def test_the_image_runs_as_nobody_in_particular_and_keeps_its_data() -> None:
    """E-17: a number, so that an engine can see that it is not root; a volume where the settings put the data."""
    assert IMAGE["USER"].isdecimal() and int(IMAGE["USER"]) > 999
    assert f"--uid {IMAGE['USER']} " in INSTALL
    assert IMAGE["VOLUME"] == ENVIRONMENT["METAQ_DATA"]
    assert f"install --directory --owner metaq --group metaq {IMAGE['VOLUME']}" in INSTALL
    assert IMAGE["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(IMAGE["ENTRYPOINT"]) == ["metaq"] and json.loads(IMAGE["CMD"]) == ["serve"]  # no shell between


def test_the_settings_of_the_image_are_settings() -> None:
    """E-17, E-20: by environment alone; what only its user can know has no default there."""
    given = gather_settings(None, ENVIRONMENT, {})
    assert len(given) == len(ENVIRONMENT)
    assert not {"advertise", "allow_public"} & given.keys()
    assert from_values(Settings, {name: said.value for name, said in given.items()}).log_format == "json"
    ports = {said.value.rpartition(":")[2] for name, said in given.items() if name.endswith("listen")}
    remoting = int(ENVIRONMENT["METAQ_REMOTING_LISTEN"].rpartition(":")[2])
    assert set(IMAGE["EXPOSE"].split()) == {*ports, str(remoting - 2)}


def test_an_image_that_is_told_nothing_says_what_it_needs(tmp_path: Path) -> None:
    """E-17, E-05: instead of serving everybody who can reach it."""
    command = [sys.executable, "-m", "metaq", *json.loads(IMAGE["CMD"])]
    environment = clean_environment(**{**ENVIRONMENT, "METAQ_DATA": str(tmp_path)})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "listen: other machines can reach 0.0.0.0" in done.stderr


@pytest.mark.slow
def test_the_commands_of_the_file_build_install_serve_and_look_after_it(tmp_path: Path) -> None:
    """E-17: the wheels are made of what the context has, and are all that is installed; healthy while it serves, then not."""
    copy(context(), tmp_path / "source")
    venv.create(tmp_path / "build", with_pip=True)
    venv.create(tmp_path / "image", with_pip=True)
    assert BUILD.startswith("COMPILE_METAQ=1 ")  # which takes minutes, and is tried by test_distribution
    pure = BUILD.replace("COMPILE_METAQ=1 ", "COMPILE_METAQ=0 ")
    moved = pure.replace("/wheels", f"{tmp_path}/wheels").replace("/source", f"{tmp_path}/source")
    run("sh", "-ec", moved, cwd=tmp_path, PATH=f"{tmp_path}/build/bin:/usr/bin:/bin")
    mount, _, rest = INSTALL.partition(" pip ")
    assert mount.startswith("--mount=type=bind,from=build,source=/wheels,target=/wheels")
    pip = "pip " + rest.partition("&&")[0].replace("/wheels", f"{tmp_path}/wheels")
    path = f"{tmp_path}/image/bin:/usr/bin:/bin"
    run("sh", "-ec", pip, cwd=tmp_path, PATH=path)
    address = f"127.0.0.1:{free_ports(2)[0]}"  # the other one is that of HTTP
    inside = {**ENVIRONMENT, "METAQ_DATA": str(tmp_path / "data"), "METAQ_LISTEN": address, "METAQ_BROKER": address}
    inside |= {"METAQ_REMOTING_LISTEN": "127.0.0.1:0", "METAQ_REGISTRY_LISTEN": "127.0.0.1:0", "PATH": path}
    assert DEFAULT_BROKER.rpartition(":")[2] == ENVIRONMENT["METAQ_LISTEN"].rpartition(":")[2]  # where the check looks
    check = json.loads(IMAGE["HEALTHCHECK"].partition(" CMD ")[2])

    def healthy() -> bool:
        done = subprocess.run(check, env=clean_environment(**inside), capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    assert not healthy()
    command = [*json.loads(IMAGE["ENTRYPOINT"]), *json.loads(IMAGE["CMD"])]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=clean_environment(**inside), stdout=output, stderr=output)
    try:
        wait_until(lambda: b"metaq ready" in log.read_bytes() or process.poll() is not None, DEADLINE_S, "it serves")
        assert healthy()
        process.terminate()
        assert process.wait(60) == 0
        assert not healthy()
    finally:
        process.kill()
        process.wait()
    assert b'"event": "stopped"' in log.read_bytes()
