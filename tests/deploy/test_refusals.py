"""Causes that keep a deployment from beginning, or end it: it names the host and the reason, and changes nothing."""

import socket
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.pair import Pair
from tests.support.smalldisk import needs_root, small_disk

pytestmark = [pytest.mark.partner("sshd"), pytest.mark.timeout(900)]

UNTOUCHED: Final = "nothing was changed on any host"
MIB: Final = 1024**2


def test_a_host_that_is_down(pair: Pair) -> None:
    """E-18: is named; status shows the others all the same."""
    pair.hosts[1].stop()
    said = pair.fab.refused("deploy")
    assert f"b: no SSH to root@127.0.0.1:{pair.hosts[1].port}" in said and UNTOUCHED in said
    assert pair.untouched()
    rows = {line.split()[0]: line for line in pair.fab.run_any("status").output.splitlines()}
    assert "not deployed" in rows["a"] and "no SSH to" in rows["b"]
    assert "b: no SSH" in pair.fab.refused("restart")


def test_a_host_whose_key_is_not_known(pair: Pair, tmp_path: Path) -> None:
    """E-05: nobody else's machine is taken for ours."""
    (tmp_path / "nobody").touch()
    pair.configure(known_hosts=str(tmp_path / "nobody"))
    said = pair.fab.refused("deploy")
    assert "b: no SSH to" in said and "not found in known_hosts" in said and UNTOUCHED in said


def test_a_port_that_is_taken(pair: Pair) -> None:
    """E-18: with the setting that names it; also the one two below."""
    taken = pair.ports["b"].remoting_listen - 2
    with socket.create_server(("127.0.0.1", taken)):
        for task in ("deploy", "upgrade-check"):
            said = pair.fab.refused(task)
            reason = f"cannot listen on 127.0.0.1:{taken}: Address already in use"
            assert f"b: broker.remoting_listen, the port 2 below: {reason}" in said and UNTOUCHED in said
    assert pair.untouched()


def test_python(pair: Pair, tmp_path: Path) -> None:
    """E-18: there is none, it is too old, or another one than here."""
    pair.configure(python="python9")
    assert "b: no Python: python9 cannot be run" in pair.fab.refused("deploy")
    old = tmp_path / "old-python"
    pretend = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv.pop(1))"
    old.write_text(f'#!/bin/sh\nexec python3 -c "{pretend}" "$2" "$3"\n')
    old.chmod(0o755)
    pair.configure(python=str(old))
    assert f"b: {old} is 3.9, and metaq needs 3.11 or newer" in pair.fab.refused("deploy")
    assert pair.untouched()


def test_users_and_permissions(pair: Pair, tmp_path: Path) -> None:
    """E-18: a user that is not there, a folder that cannot be one, systemd where there is none."""
    pair.configure(user="nobody-at-all", folder="/dev/null/metaq")
    said = pair.fab.refused("deploy")
    assert "b: there is no user nobody-at-all" in said and "b: /dev/null is not a folder" in said
    (tmp_path / "file").touch()
    pair.configure(broker=pair.broker(pair.hosts[1], data=str(tmp_path / "file")))
    assert f"b: {tmp_path / 'file'} is not a folder" in pair.fab.refused("deploy")
    if not Path("/run/systemd/system").exists():
        pair.configure(processes="systemd")
        assert "b: systemd is not the init of this machine" in pair.fab.refused("deploy")
    assert pair.untouched()


@needs_root
def test_a_disk_that_is_too_small(pair: Pair, tmp_path: Path) -> None:
    """E-18: for the release, or for the data: before anything is uploaded."""
    with small_disk(tmp_path / "small", f"size={20 * MIB}") as disk:
        pair.configure(folder=str(disk / "metaq"))
        assert f"b: disk full: {disk / 'metaq'} has 20 MiB free, and" in pair.fab.refused("deploy")
        pair.configure(broker=pair.broker(pair.hosts[1], data=str(disk / "data")))
        said = pair.fab.refused("deploy")
        assert f"b: disk full: {disk / 'data'} has 20 MiB free, and 128 MiB are needed" in said and UNTOUCHED in said
        assert pair.untouched() and list(disk.iterdir()) == []


@pytest.mark.slow
@needs_root
def test_deployments_that_fail_half_way(pair: Pair, tmp_path: Path) -> None:
    """E-18: no file can be made any more: what was installed is taken away, and later it succeeds.

    Then a release whose broker does not start: nothing more is restarted, and a rollback mends it.
    """
    a, b = pair.hosts
    with small_disk(tmp_path / "small", "nr_inodes=200") as disk:
        pair.configure(folder=str(disk / "metaq"))
        said = pair.fab.refused("deploy")
        assert "b: installing supervisor" in said and "No space left on device" in said
        assert list((disk / "metaq" / "releases").iterdir()) == []
        assert not (a.home / "metaq" / "current").exists()
    pair.configure()
    assert "runs on 2 hosts" in pair.fab.run("deploy")
    first = (b.home / "metaq" / "current").readlink()

    pair.configure(broker=pair.broker(b, tls_certificate="/dev/null/none"))
    said = pair.fab.refused("deploy")
    assert "metaq: b: broker does not" in said and "/dev/null/none" in said
    assert said.endswith("stopped here; still to do: broker on b\n")
    rows = {line.split()[0]: line.split() for line in pair.fab.run_any("status").output.splitlines()}
    assert rows["a"][2] == "running" and rows["b"][2] != "running"
    assert "runs on 2 hosts" in pair.fab.run("rollback")
    assert (b.home / "metaq" / "current").readlink() == first
