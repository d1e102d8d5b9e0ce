"""compose.yaml, as far as it can be tried without a container engine: what it names is there, and its brokers work together.

The services run as plain processes, with their environment and addresses of this machine. Not tried: the images of others, the
network and the volumes of the engine, and that Prometheus and Grafana read their files.
"""

import contextlib
import http
import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import metaq
from metaq.config import Settings, gather_settings
from metaq.fields import from_values
from tests.docs.examples import ROOT
from tests.packaging.built import clean_environment
from tests.packaging.test_container import ENVIRONMENT, IMAGE
from tests.support.broker import SEGMENT_BYTES, wait_until
from tests.support.ports import free_ports
from tests.support.zookeeper import ZooKeeperProcess

COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]
OURS: Final = {name: service for name, service in SERVICES.items() if service["image"] == "metaq"}
REPLICAS: Final = sorted(name for name in OURS if name.startswith("replica"))
DEADLINE_S: Final = 60.0
HTTP_PORT: Final = 8124


def settings_of(name: str) -> dict[str, str]:
    """The environment of a service: that of the image, and its own."""
    return {**ENVIRONMENT, **SERVICES[name]["environment"]}


def in_profile(profile: str | None) -> set[str]:
    return {name for name, service in SERVICES.items() if service.get("profiles") == (profile and [profile])}


def mounts(name: str) -> dict[str, str]:
    """What is mounted in a service, by the place in its container."""
    return {
        place.removesuffix(":ro"): source for source, _, place in (line.partition(":") for line in SERVICES[name]["volumes"])
    }


def provisioned(kind: str) -> list[dict[str, Any]]:
    """What Grafana is given of a kind."""
    file = ROOT / mounts("grafana")[f"/etc/grafana/provisioning/{kind}/metaq.yaml"]
    given: list[dict[str, Any]] = yaml.safe_load(file.read_text("utf-8"))[{"dashboards": "providers"}.get(kind, kind)]
    return given


def test_one_broker_is_the_default_and_the_rest_has_profiles() -> None:
    """E-17: and what a service depends on comes with it."""
    assert in_profile(None) == {"broker"}
    assert in_profile("cluster") == {"replica1", "replica2", "replica3", "zookeeper"}
    assert in_profile("monitoring") == {"prometheus", "grafana"}
    for service in SERVICES.values():
        for needed in service.get("depends_on", []):
            assert SERVICES[needed]["profiles"] == service["profiles"]


def test_what_services_mount_and_build_from_is_there() -> None:
    """E-17: files of this tree, or volumes that are declared and used once."""
    used = [source for name in SERVICES for source in mounts(name).values()]
    files = [source for source in used if source.startswith("./")]
    assert [source for source in files if not (ROOT / source).is_file()] == []
    assert sorted(set(used) - set(files)) == sorted(COMPOSE["volumes"])
    assert len(set(used)) == len(used)
    for name, service in OURS.items():
        assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert mounts(name) == {ENVIRONMENT["METAQ_DATA"]: name}
        assert int(service["stop_grace_period"].removesuffix("s")) * 1000 > Settings().drain_timeout_ms


@pytest.mark.parametrize("name", OURS)
def test_the_settings_of_a_service_are_settings(name: str) -> None:
    """E-17, E-20: clients reach it under the name it has in the network, or at a port that is published."""
    given = gather_settings(None, settings_of(name), {})
    settings = from_values(Settings, {setting: said.value for setting, said in given.items()})
    host, _, port = settings.advertise.rpartition(":")
    assert port == settings.remoting_listen.rpartition(":")[2]
    assert host == name or f"{settings.advertise}:{port}" in SERVICES[name]["ports"]
    assert settings.http_listen == f"0.0.0.0:{HTTP_PORT}" and settings.allow_public


def test_ports_are_published_on_this_machine_only() -> None:
    """E-05: as nothing has users; and they are those that the image names."""
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert [port for ports in published.values() for port in ports if not port.startswith("127.0.0.1:")] == []
    inside = {port.rpartition(":")[2] for port in published["broker"]}
    assert inside - {str(HTTP_PORT)} <= set(IMAGE["EXPOSE"].split())


def test_prometheus_reads_all_brokers_with_the_labels_that_alarms_need() -> None:
    """E-01: and its rules; Grafana has it as source, and the dashboard."""
    config = yaml.safe_load((ROOT / mounts("prometheus")["/etc/prometheus/prometheus.yml"]).read_text("utf-8"))
    assert [f"/etc/prometheus/{file}" in mounts("prometheus") for file in config["rule_files"]] == [True]
    alone, replicas = config["scrape_configs"]
    (target,) = alone["static_configs"]
    assert target["targets"] == [f"broker:{HTTP_PORT}"] and set(target["labels"]) == {"cluster", "broker"}
    assert target["labels"]["broker"] == Settings().broker_name
    (names,) = replicas["dns_sd_configs"]
    assert (names["names"], names["port"]) == (REPLICAS, HTTP_PORT)
    labels = {rule["target_label"]: rule.get("replacement") for rule in replicas["relabel_configs"]}
    assert labels["broker"] == SERVICES["replica1"]["environment"]["METAQ_BROKER_NAME"]
    assert (labels["job"], alone["job_name"]) == ("metaq", "metaq")
    grafana = mounts("grafana")
    (source,) = provisioned("datasources")
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus" and source["isDefault"]
    (folder,) = provisioned("dashboards")
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert grafana[home] == "./docs/metaq-grafana.json" and Path(home).parent == Path(folder["options"]["path"])


# -- the replicas -----------------------------------------------------------------------------------------------------


class Places:
    """Addresses of this machine in place of those of the engine's network."""

    def __init__(self, zookeeper: str) -> None:
        self._places = {("zookeeper", "2181"): zookeeper}

    def of(self, host: str, port: str) -> str:
        if (host, port) not in self._places:
            self._places[host, port] = f"127.0.0.1:{free_ports(1)[0]}"
        return self._places[host, port]

    def moved(self, name: str, text: str) -> str:
        """A setting of a service, in which 0.0.0.0 is the service itself."""
        hosts = "|".join(map(re.escape, SERVICES))
        return re.sub(
            rf"\b({hosts}|0\.0\.0\.0):(\d+)\b", lambda at: self.of(name if at[1] == "0.0.0.0" else at[1], at[2]), text
        )


def is_ready(address: str) -> bool:
    """Return whether a replica is: a master with enough slaves, or a slave in sync."""
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def running(places: Places, folder: Path) -> Iterator[dict[str, Path]]:
    """The replicas as processes; their logs by name."""
    logs = {name: folder / f"{name}.log" for name in REPLICAS}
    with contextlib.ExitStack() as stack:
        for name, log in logs.items():
            moved = {setting: places.moved(name, text) for setting, text in settings_of(name).items()}
            inside = {**moved, "METAQ_DATA": str(folder / name), "METAQ_AMPLE_FREE_BYTES": "0"}
            inside["METAQ_SEGMENT_BYTES"] = str(SEGMENT_BYTES)  # which takes less room
            with log.open("wb") as output:
                command = [sys.executable, "-m", "metaq", *json.loads(IMAGE["CMD"])]
                process = subprocess.Popen(command, env=clean_environment(**inside), stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield logs


@pytest.mark.slow
@pytest.mark.partner("java")
def test_the_replicas_elect_a_master_and_acknowledge_together(tmp_path: Path) -> None:
    """E-17: all three are in sync, and what one acknowledges is read by a client of another."""
    with ZooKeeperProcess(tmp_path / "zookeeper") as zookeeper:
        places = Places(zookeeper.address)
        with running(places, tmp_path) as logs:
            doors = [places.of(name, str(HTTP_PORT)) for name in logs]
            wait_until(lambda: all(map(is_ready, doors)), DEADLINE_S, f"all are ready; see {tmp_path}", 0.1)
            with metaq.connect(places.of("replica1", "9876")) as client:
                client.producer().send("hello", b"world")
            with (
                metaq.connect(places.of("replica3", "9876")) as client,
                client.consumer("hello", "readers", consume_from=metaq.ConsumeFrom.FIRST) as consumer,
            ):
                message = consumer.receive(DEADLINE_S)
                assert message is not None and message.body == b"world"
