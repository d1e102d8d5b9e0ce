"""A broker's answers over HTTP: its metrics, read by the parser of Prometheus's own client, and its health."""

import http.client
from collections.abc import Mapping
from typing import Any

import orjson
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess


def fetch(broker: BrokerProcess, path: str, method: str = "GET", secret: str = "") -> tuple[int, bytes]:
    """Status and body of one answer to whoever has this secret."""
    host, _, port = broker.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=SOCKET_TIMEOUT_S)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {secret}"} if secret else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def readiness(broker: BrokerProcess) -> dict[str, Any]:
    """Return the answer of /readyz, and check that its status code agrees with it."""
    status, body = fetch(broker, "/readyz")
    found: dict[str, Any] = orjson.loads(body)
    assert status == (200 if found["ready"] else 503), (status, found)
    assert found["ready"] == (not found["reasons"]), found
    return found


def families(broker: BrokerProcess, secret: str = "") -> dict[str, Metric]:
    """Return the families of /metrics by the name that their samples begin with: a counter's with its ``_total``."""
    status, body = fetch(broker, "/metrics", secret=secret)
    assert status == 200, body
    found = text_string_to_metric_families(body.decode())
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in found}


class Values:
    """All samples of one scrape."""

    def __init__(self, broker: BrokerProcess, secret: str = "") -> None:
        self._found = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families(broker, secret).values()
            for sample in family.samples
        }

    def get(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        """One value; 0 when there is none."""
        return self._found.get((name, frozenset((labels or {}).items())), 0.0)


def value(broker: BrokerProcess, name: str, **labels: str) -> float:
    """One value of a scrape that is made for it; 0 when there is none."""
    return Values(broker).get(name, labels)
