"""The Helm chart: its templates are rendered, and what comes out fits together, and fits the image and the settings.

Go's template language and a few functions stand for Helm (``helm/render.go``); where the program ``helm`` is installed, as in
the workflow ``ci``, it renders them as well. Not tried: that a cluster takes them, and what its controllers do.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import metaq
from metaq.config import Settings, load
from tests.docs.examples import ROOT
from tests.packaging.test_container import ENVIRONMENT, IMAGE

CHART: Final = ROOT / "deploy" / "helm" / "metaq"
TEMPLATES: Final = {file.name: file.read_text("utf-8") for file in (CHART / "templates").iterdir()}
VALUES: Final[dict[str, Any]] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
DESCRIPTION: Final[dict[str, Any]] = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
RELEASE: Final = {"Name": "orders", "Namespace": "shop", "Service": "Helm"}
ONE: Final[dict[str, Any]] = {
    "image": {"repository": "example.com/metaq"},
    "settings": {"allow_public": True, "keep_hours": 24},
}
THREE: Final[dict[str, Any]] = {
    "image": {"repository": "example.com/metaq", "tag": "1"},
    "replicas": 3,
    "settings": {
        "zookeeper": "zookeeper:2181",
        "durability": "replica",
        "broker_name": "orders",
        "topics": {"a": {"partitions": 2}},
    },
    "usersSecret": "metaq-users",
    "persistence": {"storageClass": "fast"},
    "resources": {"requests": {"memory": "256Mi"}},
    "serviceMonitor": {"enabled": True, "basicAuthSecret": "metaq-login"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "podAnnotations": {"team": "shop"},
}

Objects = dict[tuple[str, str], dict[str, Any]]
Render = Callable[[dict[str, Any]], "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.partner("go")


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Values over those of a chart, as Helm lays them."""
    both = {name: merged(base[name], value) for name, value in more.items() if isinstance(value, dict) and base.get(name)}
    return {**base, **more, **both}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """The program that stands for Helm."""
    program = tmp_path_factory.mktemp("render") / "render"
    source = Path(__file__).with_name("helm") / "render.go"
    subprocess.run(["go", "build", "-o", str(program), str(source)], check=True, cwd=source.parent, timeout=280)
    chart = {"Name": DESCRIPTION["name"], "Version": DESCRIPTION["version"], "AppVersion": DESCRIPTION["appVersion"]}

    def render(values: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
        data = {"Values": merged(VALUES, values), "Release": RELEASE, "Chart": chart}
        command = [str(program), str(CHART / "templates")]
        done = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            texts = {name: text for name, text in json.loads(done.stdout).items() if name.endswith(".yaml")}
            done.stdout = "\n---\n".join(texts.values())
        return done

    return render


def with_helm(values: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    """Helm itself, for the oldest cluster that the chart is for."""
    oldest = DESCRIPTION["kubeVersion"].removeprefix(">=").removesuffix("-0")
    command = ["helm", "template", RELEASE["Name"], str(CHART), "--namespace", RELEASE["Namespace"], "--values", "-"]
    command += ["--kube-version", oldest]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module", params=["stand-in", "helm"] if shutil.which("helm") else ["stand-in"])
def render(request: pytest.FixtureRequest, stand_in: Render) -> Render:
    return with_helm if request.param == "helm" else stand_in


def objects(render: Render, values: dict[str, Any]) -> Objects:
    """What a cluster would be given, by kind and name."""
    done = render(values)
    assert done.returncode == 0, done.stderr
    found = [document for document in yaml.safe_load_all(done.stdout) if document]
    named = {(document["kind"], document["metadata"]["name"]): document for document in found}
    assert len(named) == len(found)
    return named


def pod_of(found: Objects) -> dict[str, Any]:
    pod: dict[str, Any] = found["StatefulSet", "orders"]["spec"]["template"]["spec"]
    return pod


def settings_of(found: Objects, folder: Path) -> Settings:
    """The settings of the first broker, as it would read them."""
    (container,) = pod_of(found)["containers"]
    _, _, file = container["args"]
    (mount,) = [mount for mount in container["volumeMounts"] if file.startswith(f"{mount['mountPath']}/")]
    (volume,) = [volume for volume in pod_of(found)["volumes"] if volume["name"] == mount["name"]]
    text = found["ConfigMap", volume["configMap"]["name"]]["data"][Path(file).name]
    (folder / "broker.yaml").write_text(text)
    known = {
        "metadata.name": "orders-1",
        "metadata.namespace": RELEASE["Namespace"],
        "metadata.labels['apps.kubernetes.io/pod-index']": "1",
    }
    given: dict[str, str] = {}
    for variable in container["env"]:
        value = variable.get("value") or known[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        given[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], value)
    ours = {name: value for name, value in given.items() if name.startswith("METAQ_")}
    return load(folder / "broker.yaml", {**ENVIRONMENT, **ours}, {})


@pytest.mark.parametrize("values", [ONE, THREE], ids=["one", "three"])
def test_the_parts_of_a_release_fit_together(render: Render, values: dict[str, Any]) -> None:
    """E-17: selectors find the pods, ports and mounts have their other end, probes ask what the broker answers."""
    found = objects(render, values)
    stateful = found["StatefulSet", "orders"]["spec"]
    labels, pod = stateful["template"]["metadata"]["labels"], pod_of(found)
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    services = {name: document["spec"] for (kind, name), document in found.items() if kind == "Service"}
    assert set(services) == {"orders", "orders-pods"} and stateful["serviceName"] == "orders-pods"
    for service in services.values():
        assert service["selector"].items() <= labels.items()
        assert all(ports[port["targetPort"]] == port["port"] for port in service["ports"])
    assert services["orders-pods"]["clusterIP"] == "None" and services["orders-pods"]["publishNotReadyAddresses"] is True
    assert stateful["selector"]["matchLabels"].items() <= labels.items()
    claims = {claim["metadata"]["name"] for claim in stateful["volumeClaimTemplates"]}
    volumes = claims | {volume["name"] for volume in pod["volumes"]}
    mounted = {mount["name"] for one in (container, *pod.get("initContainers", [])) for mount in one["volumeMounts"]}
    assert mounted == volumes
    probes = {probe: container[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe")}
    assert {probe: asked["path"] for probe, asked in probes.items()} == {
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {ports[asked["port"]] for asked in probes.values()} == {8124}


@pytest.mark.parametrize("values", [ONE, THREE], ids=["one", "three"])
def test_a_pod_runs_the_image_as_it_is_meant(render: Render, values: dict[str, Any], tmp_path: Path) -> None:
    """E-17, E-20: its user, its data; its settings load, and lead clients to the pod."""
    found = objects(render, values)
    pod, settings = pod_of(found), settings_of(found, tmp_path)
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(IMAGE["USER"])
    places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert places["data"] == str(settings.data) == IMAGE["VOLUME"]
    assert pod["terminationGracePeriodSeconds"] * 1000 > settings.drain_timeout_ms
    assert pod["enableServiceLinks"] is False  # its variables METAQ_… would be unknown settings
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.advertise == f"orders-1.orders-pods.shop.svc:{ports['remoting']}"
    listening = {"text": settings.listen, "http": settings.http_listen, "registry": settings.registry_listen}
    assert {name: f"0.0.0.0:{ports[name]}" for name in listening} == listening
    assert ports["remoting-fast"] == ports["remoting"] - 2


def test_one_broker_is_a_master_alone(render: Render, tmp_path: Path) -> None:
    """E-17: with its settings, and nothing that several need."""
    found = objects(render, ONE)
    assert {kind for kind, _ in found} == {"ConfigMap", "Service", "StatefulSet"}
    settings = settings_of(found, tmp_path)
    assert (settings.role, settings.keep_hours, settings.replication_listen) == ("master", 24, "none")
    (container,) = pod_of(found)["containers"]
    assert container["image"] == f"example.com/metaq:{metaq.__version__}"


def test_three_replicas_elect_with_users_and_are_watched(render: Render, tmp_path: Path) -> None:
    """E-17: numbered from 1; the users' file is the broker's own; the labels are those that the alarms need."""
    found = objects(render, THREE)
    stateful = found["StatefulSet", "orders"]["spec"]
    assert (stateful["replicas"], stateful["ordinals"]["start"], stateful["podManagementPolicy"]) == (3, 1, "Parallel")
    settings = settings_of(found, tmp_path)
    assert (settings.role, settings.replica_number, settings.zookeeper) == ("elected", 1, "zookeeper:2181")
    assert settings.replication_listen == "0.0.0.0:10914" and settings.topics["a"].partitions == 2
    (users,) = pod_of(found)["initContainers"]
    assert "--mode=600" in users["command"] and users["command"][-1] == settings.users_file
    assert found["PodDisruptionBudget", "orders"]["spec"]["maxUnavailable"] == 1
    monitor = found["ServiceMonitor", "orders"]["spec"]
    watched = found["Service", "orders-pods"]
    assert monitor["selector"]["matchLabels"].items() <= watched["metadata"]["labels"].items()
    assert not monitor["selector"]["matchLabels"].items() <= found["Service", "orders"]["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in watched["spec"]["ports"]}
    labels = {rule["targetLabel"]: rule["replacement"] for rule in endpoint["relabelings"]}
    assert labels == {"job": "metaq", "cluster": settings.cluster_name, "broker": settings.broker_name}
    assert endpoint["basicAuth"]["password"] == {"name": "metaq-login", "key": "password"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"settings": {"allow_public": True}}, "image.repository: set where the image of metaq is"),
        ({"image": {"repository": "a"}}, "usersSecret or settings.allow_public: without users everybody"),
        ({**ONE, "replicas": 3}, "set settings.zookeeper to HOST:PORT,HOST:PORT"),
        ({**ONE, "settings": {"allow_public": True, "zookeeper": "a:1"}, "replicas": 2}, "two cannot continue safely"),
    ],
)
def test_values_that_cannot_work_are_refused(render: Render, values: dict[str, Any], reason: str) -> None:
    """E-17: before anything is installed, with what to do."""
    done = render(values)
    assert done.returncode != 0
    assert reason in done.stderr


def test_a_changed_setting_restarts_the_pods(render: Render) -> None:
    """E-17: by an annotation."""
    marks = {
        objects(render, {**ONE, "settings": {"allow_public": True, "keep_hours": hours}})["StatefulSet", "orders"]["spec"]
        ["template"]["metadata"]["annotations"]["metaq/settings"]
        for hours in (1, 2)
    }  # fmt: skip
    assert len(marks) == 2


def test_every_value_is_used_and_every_used_one_has_a_default() -> None:
    """E-17: and the version is that of the package."""
    text = "".join(TEMPLATES.values())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    ours = {name for name in used if not name.startswith("settings.")}
    known = {f"{name}.{inner}" for name, value in VALUES.items() if isinstance(value, dict) for inner in value} | set(VALUES)
    assert ours <= known
    assert {name.partition(".")[0] for name in used} == set(VALUES)
    assert {name for name in known if "." in name} <= used
    assert DESCRIPTION["version"] == DESCRIPTION["appVersion"] == metaq.__version__
