"""The API's document: valid, complete, and made of the types that check the input."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from metaq.server.api.operations import OPERATIONS, ROOT
from metaq.server.api.site import BOUNDS
from metaq.server.console.assets import Assets
from metaq.server.http.away import CONNECTION_S
from metaq.server.http.environ import DEADLINE
from tests.support.broker import BrokerProcess
from tests.support.rest import Rest
from tests.support.served import Browser, Served


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    folder: Path = tmp_path_factory.mktemp("document")
    with BrokerProcess(folder / "data") as broker, Rest(broker.http) as rest:
        yield rest


@pytest.fixture(scope="module")
def document(rest: Rest) -> dict[str, Any]:
    answer = rest.send("GET", "/api/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = answer.content
    return found


def test_it_is_valid(document: dict[str, Any]) -> None:
    """E-32: OpenAPI 3.1, references included."""
    OpenAPIV31SpecValidator(document).validate()
    assert document["openapi"].startswith("3.1.")


def test_it_has_every_operation(document: dict[str, Any]) -> None:
    """E-32: with a sentence, its parameters, and the form of errors."""
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert found == {(operation.method, f"{ROOT}{operation.path}") for operation in OPERATIONS}
    for path, methods in document["paths"].items():
        for described in methods.values():
            assert described["summary"], path
            in_path = {each["name"] for each in described["parameters"] if each["in"] == "path"}
            assert in_path == set(re.findall(r"{(\w+)}", path))
            assert "application/problem+json" in described["responses"]["default"]["content"]
    ids = [operation.id for operation in OPERATIONS]
    assert len(set(ids)) == len(ids)


def test_limits_in_it_are_those_that_are_checked(rest: Rest, document: dict[str, Any]) -> None:
    """E-32: there is one definition: one beyond the document's limit is refused, and the limit is not."""
    parameters = document["paths"][f"{ROOT}/topics"]["get"]["parameters"]
    (limit,) = [each["schema"] for each in parameters if each["name"] == "limit"]
    assert rest.get("/topics", limit=limit["maximum"])["rows"] == []
    for wrong in (limit["maximum"] + 1, limit["minimum"] - 1, "many"):
        assert "$.limit" in rest.refused(400, "GET", "/topics", limit=wrong)["detail"]
    properties = document["components"]["schemas"]["TopicSettingsInput"]["properties"]["partitions"]
    most = properties["anyOf"][0]["maximum"]
    assert "$.partitions" in rest.refused(400, "PUT", "/topics/t", {"partitions": most + 1})["detail"]


def test_its_page_needs_nothing_else(rest: Rest, document: dict[str, Any]) -> None:
    """E-32: no script, nothing from elsewhere; every path and type is on it, and ``/api`` leads there."""
    answer = rest.send("GET", "/api/docs")
    text = answer.data.decode()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in text
    assert re.findall(r"""(?:src|href)=["'](?!#|/api/)""", text) == []
    for path in document["paths"]:
        assert path in text
    for link in re.findall(r'href="#(\w+)"', text):
        assert f'id="{link}"' in text
    moved = rest.send("GET", "/api")
    assert (moved.status, moved.headers["location"]) == (303, "/api/docs")


@pytest.mark.parametrize("path", ["/api/docs", "/api/openapi.json", Assets().address("htmx.min.js")])
def test_who_does_not_read_it_keeps_nobody_out(tmp_path: Path, path: str) -> None:
    """E-05: nor who does not read a file of the console: everybody may ask for these, and they are no requests in progress."""
    limits: list[float] = []
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        environ: dict[str, Any] = {"PATH_INFO": path, DEADLINE: SimpleNamespace(within=limits.append)}
        setup_testing_defaults(environ)
        unread = [iter(served.broker.site(environ, lambda *_: None)) for _ in range(BOUNDS.calls)]
        assert len({next(answer) for answer in unread}) == 1
        assert limits[-1] == CONNECTION_S
        for other in ("/api/v1/topics", "/console/topics"):
            answer = Browser(served).ask(f"GET {other} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert answer is not None and " 200 " in answer.status
        assert sum(len(part) for answer in unread for part in answer) == 0
