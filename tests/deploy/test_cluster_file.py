"""``conf/cluster.yaml``: its contents, and how a wrong file is refused."""

import os
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from metaq.deploy.cluster import OF_ONE_HOST, Cluster, ClusterSettings, HostSettings, installed
from metaq.deploy.wheels import BESIDE, STORE, build
from metaq.errors import ConfigError, DeployFailed
from metaq.fields import declared
from metaq.store.recovery.recovery import FEATURES

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = ROOT / "conf" / "cluster.yaml"


def host(number: int = 1, **others: Any) -> dict[str, Any]:
    """One that is right."""
    broker = {"data": "/data", "listen": f"10.0.0.{number}:8123", "replica_number": number}
    return {"address": f"10.0.0.{number}", "broker": broker, **others}


def refused(tmp_path: Path, content: Any) -> str:
    """Why a file is refused."""
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as error:
        Cluster.read(file)
    return str(error.value).removeprefix(f"{file}: ")


def test_the_example_names_every_key() -> None:
    """E-18: and is read; each key stands with its default, but for who runs and asks, and the settings."""
    cluster = Cluster.read(EXAMPLE)
    assert [str(service) for host in cluster.hosts for service in host.services] == [
        f"broker on {name}" for name in ("one", "two", "three")
    ]
    assert cluster.extras == "[timers,zookeeper]"
    content: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    fields = {**declared(ClusterSettings), **declared(HostSettings)}
    common = fields.keys() - set(OF_ONE_HOST)
    assert content.keys() == common
    others = common - {"hosts", "settings", "user", "admin"}
    assert {name: content[name] for name in others} == {name: fields[name].default for name in others}


def test_a_host_wins_over_what_all_have(tmp_path: Path) -> None:
    """E-18: also with the settings of its broker."""
    file = tmp_path / "cluster.yaml"
    given = host(ssh_port=2022)
    given["broker"]["durability"] = "memory"
    file.write_text(yaml.safe_dump({"ssh_user": "me", "settings": {"durability": "disk"}, "hosts": {"a": given, "b": host(2)}}))
    first, second = Cluster.read(file).hosts
    assert (first.settings.ssh_user, first.settings.ssh_port, second.settings.ssh_port) == ("me", 2022, 22)
    assert [found.services[0].settings.durability for found in (first, second)] == ["memory", "disk"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ssh_prt": 22}, "hosts.a.ssh_prt: there is no such name; did you mean ssh_port?"),
        ({"ssh_port": "x"}, "hosts.a.ssh_port: must be a whole number"),
        ({"folder": "metaq"}, "hosts.a.folder: needs an absolute path of letters, digits and ./+-_; it is metaq"),
        ({"broker": None}, "hosts.a: needs a broker or a registry"),
        ({"broker": {"data": "/data", "lissten": "x"}}, "hosts.a.broker.lissten: unknown setting; did you mean listen?"),
        ({"broker": {"data": "data"}}, "hosts.a.broker.data: needs an absolute path of letters, digits and ./+-_; it is data"),
        ({"broker": {}}, "hosts.a.broker.data: needs an absolute path of letters, digits and ./+-_; it is not there"),
        ({"broker": {"data": "/a b"}}, "hosts.a.broker.data: needs an absolute path of letters, digits and ./+-_; it is /a b"),
        ({"user": "me; reboot"}, "hosts.a.user: needs a name of letters, digits and ._-; it is me; reboot"),
        ({"python": "python3 -S"}, "hosts.a.python: needs a command of letters, digits and ./+-_; it is python3 -S"),
        ({"address": ""}, "hosts.a.address: needs an address; it is not there"),
        (
            {"broker": {"data": "/d", "remoting_listen": "127.0.0.1:8123"}},
            "hosts.a.broker.remoting_listen: port 8123 of that machine is already used by the broker on a",
        ),
        (
            {"broker": {"data": "/d", "replication_listen": "0.0.0.0:8124", "allow_public": True}},
            "hosts.a.broker.replication_listen: port 8124 of that machine is already used by the broker on a",
        ),
        (
            {"broker": {"data": "/d", "registries": "x:1"}, "registry": {"data": "/x/../d"}},
            "hosts.a.broker.data: /d of that machine is already used by registry on a",
        ),
        (
            {"registry": {"data": "/r"}},
            "hosts.a.broker.registry_listen: port 9876 of that machine is already used by the registry on a",
        ),
        ({"broker": {"data": "/d", "listen": "127.0.0.1:0"}}, "hosts.a.broker.listen: '127.0.0.1:0' is not HOST:PORT"),
        ({"broker": {"data": "/d", "role": "elected"}}, "hosts.a.broker.settings: role elected needs zookeeper"),
        (
            {"broker": {"data": "/d", "users_file": "/u"}},
            "hosts.a.broker.users_file: needs an absolute path, and the key admin",
        ),
        ({"registry": {"data": "/d", "listen": "x:1"}}, "hosts.a.registry.listen: unknown setting"),
    ],
)
def test_what_is_wrong_is_named_with_its_host(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    """E-18: before any host is reached."""
    assert refused(tmp_path, {"hosts": {"a": host(**change)}}).startswith(reason)


def test_with_users_fab_asks_as_one_of_them(tmp_path: Path) -> None:
    """E-05, E-18: the secret stays in the file on the host."""
    file = tmp_path / "cluster.yaml"
    given = host(registry={"data": "/registry", "registry_listen": "10.0.0.1:9900"})
    given["broker"]["users_file"] = "/etc/metaq users.yaml"
    file.write_text(yaml.safe_dump({"admin": "ops", "hosts": {"a": given}}))
    registry, broker = Cluster.read(file).hosts[0].services
    assert broker.login == " --user ops --users-file '/etc/metaq users.yaml'"
    assert registry.login == ""


def test_what_is_wrong_with_the_whole(tmp_path: Path) -> None:
    """E-18: a key, no host, a host without lines, two replicas of one number."""
    assert refused(tmp_path, {"pakage": ".", "hosts": {"a": host()}}).startswith(
        "pakage: there is no such name; did you mean package?"
    )
    assert refused(tmp_path, {"hosts": {}}).startswith("hosts: needs at least one host")
    assert refused(tmp_path, {"hosts": {"a b": host()}}) == "hosts.a b: the name of a host has only letters, digits and ._-"
    assert refused(tmp_path, {"hosts": {"a": None}}).startswith("hosts.a: is empty; it needs an address")
    twice = refused(tmp_path, {"hosts": {"a": host(), "b": host(address="10.0.0.2")}})
    assert twice.startswith("hosts.b.broker.replica_number: 1 of metaq is on a already")
    assert "cannot read the configuration file" in refused_file(tmp_path / "none.yaml")


def refused_file(file: Path) -> str:
    """Why a file that is not there is refused."""
    with pytest.raises(ConfigError) as error:
        Cluster.read(file)
    return str(error.value)


def test_hosts_that_share_a_machine_share_nothing_else(tmp_path: Path) -> None:
    """E-18: two names for one address are one machine, unless SSH goes to another port there."""
    first, second = host(), host(2, address="10.0.0.1", folder="/opt/other")
    second["broker"] |= {"data": "/other", "remoting_listen": "none", "registry_listen": "10.0.0.1:9900", "http_listen": "none"}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"hosts": {"a": first, "b": second}}))
    assert len(Cluster.read(file).hosts) == 2
    for folder in ("/opt/metaq/", "//opt/metaq"):
        same_folder = {**second, "folder": folder}
        said = refused(tmp_path, {"hosts": {"a": first, "b": same_folder}})
        assert said == "hosts.b.folder: /opt/metaq of that machine is already used by host a"
    same_data = {**second, "broker": {**second["broker"], "data": "/data"}}
    said = refused(tmp_path, {"hosts": {"a": first, "b": same_data}})
    assert said == "hosts.b.broker.data: /data of that machine is already used by broker on a"
    same_port = {**second, "broker": {**second["broker"], "http_listen": "0.0.0.0:9876", "allow_public": True}}
    said = refused(tmp_path, {"hosts": {"a": first, "b": same_port}})
    assert said == "hosts.b.broker.http_listen: port 9876 of that machine is already used by the broker on a"
    file.write_text(yaml.safe_dump({"hosts": {"a": first, "b": {**same_folder, **same_data, "ssh_port": 2222}}}))
    assert len(Cluster.read(file).hosts) == 2


def test_what_listens_by_default_is_known(tmp_path: Path) -> None:
    """E-18: also the port of metrics and health, which is beside another one."""
    file = tmp_path / "cluster.yaml"
    given = {"address": "a", "registry": {"data": "/r", "registry_listen": "127.0.0.1:9900"}, "broker": {"data": "/d"}}
    file.write_text(yaml.safe_dump({"hosts": {"a": given}}))
    registry, broker = Cluster.read(file).hosts[0].services
    assert {port for _, _, port in registry.addresses()} == {9900, 9901}
    assert {port for _, _, port in broker.addresses()} == {8123, 8124, 9876, 10909, 10911}


def test_a_release_of_another_version_is_understood(tmp_path: Path) -> None:
    """E-18: as far as it matters here: where it listens, and who its users are."""
    text = 'data: "/d"\nlisten: "10.0.0.1:8200"\nof_a_later_version: 7\nusers_file: "/u"\n'
    found = installed("a", "broker", text, "ops")
    assert (found.asked_at, found.login) == ("10.0.0.1:8200", " --user ops --users-file /u")
    assert found.given["of_a_later_version"] == 7
    with pytest.raises(ConfigError, match="segment_bytes"):
        installed("a", "broker", 'data: "/d"\nsegment_bytes: "many"\n', "")


@pytest.mark.parametrize(
    ("broker", "extras"),
    [
        ({}, "[timers]"),
        ({"timer_engine": "sqlite3"}, ""),
        ({"timer_engine": "sqlite3", "zookeeper": "10.0.0.9:2181"}, "[zookeeper]"),
    ],
)
def test_what_the_settings_need_is_installed(tmp_path: Path, broker: dict[str, Any], extras: str) -> None:
    """E-18, E-12: a broker can delay messages; a registry delays none."""
    file = tmp_path / "cluster.yaml"
    one, two = host(), {"address": "10.0.0.2", "registry": {"data": "/data", "registry_listen": "10.0.0.2:9876"}}
    one["broker"].update(broker)
    file.write_text(yaml.safe_dump({"hosts": {"a": one, "b": two}}))
    assert Cluster.read(file).extras == extras


@pytest.mark.parametrize("package", ["metaq-broker", "metaq-broker==9.9.9", "{folder}/metaq_broker-9.9.9-py3-none-any.whl"])
def test_extras_are_built_however_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """E-18: by a name, a version or a wheel; its index is a folder here."""
    index, into, file = tmp_path / "index", tmp_path / "into", tmp_path / "cluster.yaml"
    index.mkdir()
    into.mkdir()
    needs = {"timers": "rocksdict", "zookeeper": "kazoo"}
    make_wheel(index, "metaq-broker", needs)
    for name in (*needs.values(), *BESIDE):
        make_wheel(index, name, {})
    for variable, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(index)), ("PIP_CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(variable, value)
    one = host()
    one["broker"]["zookeeper"] = "10.0.0.9:2181"
    file.write_text(yaml.safe_dump({"package": package.format(folder=index), "hosts": {"a": one}}))
    release = build(Cluster.read(file), into)
    assert {wheel.name.partition("-")[0] for wheel in release.wheels.iterdir()} == {"metaq_broker", *needs.values(), *BESIDE}


def make_wheel(folder: Path, name: str, needs: dict[str, str]) -> None:
    """Write a wheel of a package that pip can install; ``needs`` has a package for each of its extras."""
    plain = name.replace("-", "_")
    about = f"{plain}-9.9.9.dist-info"
    extras = "".join(f"Provides-Extra: {extra}\nRequires-Dist: {other}; extra == '{extra}'\n" for extra, other in needs.items())
    with zipfile.ZipFile(folder / f"{plain}-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("metaq/store/recovery/recovery.py", "FORMAT_VERSION: Final = 7\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\n{extras}")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.parametrize(
    ("source", "features"),
    [
        ((ROOT / STORE).read_text("utf-8"), tuple(sorted(FEATURES))),
        ('FORMAT_VERSION: Final = 1\nFEATURES: Final = frozenset(\n    (\n        "b",\n        "a",\n    )\n)\n', ("a", "b")),
        ("FORMAT_VERSION: Final = 1\nOTHERS: Final = ('c')\n", ()),
    ],
    ids=["this one", "many", "of before there were any"],
)
def test_the_features_that_a_release_reads(tmp_path: Path, source: str, features: tuple[str, ...]) -> None:
    """E-18: as its store names them, in whichever form they are written."""
    file, wheels = tmp_path / "cluster.yaml", tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "metaq_broker-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr(STORE, source)
    file.write_text(yaml.safe_dump({"package": str(wheels), "hosts": {"a": host()}}))
    release = build(Cluster.read(file), tmp_path)
    assert (release.format, release.features) == (1, features)


def test_the_name_of_a_release_covers_what_runs_it(tmp_path: Path) -> None:
    """E-18: who runs it, with which Python, and what looks after it: a change of these is deployed, too."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "metaq_broker-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("metaq/store/recovery/recovery.py", "FORMAT_VERSION: Final = 7\n")
    names = set()
    for change in ({}, {"user": "metaq"}, {"python": "python3.12"}, {"processes": "supervisor"}, {"ssh_port": 2222}):
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump({"package": str(wheels), "hosts": {"a": host(**change)}}))
        release = build(Cluster.read(file), tmp_path)
        assert (release.version, release.format) == ("9.9.9", 7)
        names.add(release.name)
    assert len(names) == 4  # how SSH gets there is none of it
    with zipfile.ZipFile(wheels / "metaq_broker-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("metaq/store/recovery/recovery.py", "")
    with pytest.raises(DeployFailed, match="does not say which data format it reads"):
        build(Cluster.read(file), tmp_path)
