"""A sample of the requests of ``tests.crash.rest``; ``make test-long`` sends the full count."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from tests.crash.command import Violation
from tests.crash.rest import Requests, run
from tests.support.rest import RestAnswer

SAMPLE = 700


def test_no_request_is_an_error_of_the_broker() -> None:
    """E-32: nothing that the document allows, or nearly does, is answered by 500, or by what the document does not have."""
    result = run(seed=7, count=SAMPLE)
    assert result.cases == SAMPLE
    assert min(result.details[f"of {status}"] for status in (200, 400, 404)) > SAMPLE / 50


PROBLEM: Mapping[str, Any] = {
    "type": "object",
    "properties": {"status": {"type": "integer"}},
    "required": ["status"],
}
ANSWERS: Mapping[str, Any] = {
    "200": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Row"}}}},
    "default": {"content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}},
}
DOCUMENT: Mapping[str, Any] = {
    "paths": {},
    "components": {"schemas": {"Row": {"type": "object", "required": ["name"]}, "Problem": PROBLEM}},
}


@pytest.mark.parametrize(
    ("status", "kind", "data"),
    [
        (500, "application/problem+json", b'{"status":500}'),
        (200, "application/json", b"{}"),
        (200, "text/html", b'{"name":1}'),
        (400, "application/json", b'{"status":400}'),
        (400, "application/problem+json", b'{"status":404}'),
        (400, "application/problem+json", b'{"status":"400"}'),
    ],
)
def test_an_answer_that_is_not_as_described_is_found(status: int, kind: str, data: bytes) -> None:
    """E-32: the check can fail."""
    requests = Requests(DOCUMENT, random.Random(0))
    requests.check("good", RestAnswer(200, {"content-type": "application/json"}, b'{"name":1}'), {"responses": ANSWERS})
    with pytest.raises(Violation):
        requests.check("bad", RestAnswer(status, {"content-type": kind}, data), {"responses": ANSWERS})
