"""The OpenAPI 3.1 document, made from the operations and the types that check their inputs."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

import metaq
from metaq.server.api.operations import OPERATIONS, ROOT, Form, Operation
from metaq.server.api.problems import CONTENT_TYPE, ProblemDetails, SubscriptionProblem
from metaq.server.services.subscribing import LeaseChanged, SubscriberInput

EVENTS: Final = "text/event-stream"
_REF: Final = "#/components/schemas/{name}"
_FRAMES: Final = (SubscriberInput, LeaseChanged, SubscriptionProblem)
"""The types of messages over WebSocket, beside the rows: the first is what clients send."""
_ABOUT: Final = """\
The REST API of one broker. Errors are problem details (RFC 9457) with the codes and sentences of the other protocols. Times are
Unix milliseconds. Lists come in pages: pass a page's `next` as `after`. Streams are server-sent events; each has one row as its
data. A subscription is a WebSocket; each of its messages is one object. Browsers may only call it from pages of the broker
itself."""


def document() -> dict[str, Any]:
    """Return the document, as JSON has it."""
    types = [kind for operation in OPERATIONS for kind in _types(operation)]
    _, schemas = msgspec.json.schema_components([*types, *_FRAMES, ProblemDetails], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(f"{ROOT}{operation.path}", {})[operation.method.lower()] = _operation(operation, schemas)
    queries = {_name(operation.takes.query) for operation in OPERATIONS if operation.takes.query is not None}
    return {
        "openapi": "3.1.0",
        "info": {"title": "metaq", "version": metaq.__version__, "description": " ".join(_ABOUT.split())},
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in schemas.items() if name not in queries},
            "securitySchemes": {
                "basic": {"type": "http", "scheme": "basic", "description": "Name and password of a user."},
                "bearer": {"type": "http", "scheme": "bearer", "description": "The secret of a user."},
            },
        },
        "security": [{"basic": []}, {"bearer": []}, {}],
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in OPERATIONS)],
    }


def _types(operation: Operation) -> Iterable[Any]:
    path, query, body, answer, _ = operation.takes
    return [kind for kind in (*path.values(), query, body, answer) if kind is not None]


def _operation(operation: Operation, schemas: Mapping[str, Any]) -> dict[str, Any]:
    takes = operation.takes
    parameters = [{"name": name, "in": "path", "required": True, "schema": _schema(kind)} for name, kind in takes.path.items()]
    if takes.query is not None:
        fields, required = schemas[_name(takes.query)]["properties"], schemas[_name(takes.query)].get("required", ())
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": _without_null(schema)}
            for name, schema in fields.items()
        ]
    found: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary.partition(": ")[0].partition("; ")[0].rstrip("."),
        "description": operation.summary,
        "tags": [operation.tag],
        "parameters": parameters,
        "responses": {
            **_answers(takes.answer, takes.form),
            "default": {"description": "Why it failed.", "content": {CONTENT_TYPE: {"schema": _schema(ProblemDetails)}}},
        },
    }
    if takes.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(takes.body)}}}
    return found


def _answers(kind: Any, form: Form) -> dict[str, Any]:
    """Return what the document says of the answers to requests that succeed, by status."""
    if form is Form.ROW:
        return {"200": {"description": "The answer.", "content": {"application/json": {"schema": _schema(kind)}}}}
    if form is Form.EVENTS:
        events = {"type": "string", "description": f"Events whose data is a {_name(kind)}, in JSON."}
        return {"200": {"description": "The rows, one after the other.", "content": {EVENTS: {"schema": events}}}}
    said, *others = _FRAMES
    sent = {"anyOf": [_schema(each) for each in (kind, *others)]}
    words = f"WebSocket. The broker sends messages of these types; the client sends a {_name(said)} each time."
    return {"101": {"description": words, "content": {"application/json": {"schema": sent}}, "x-sent": _schema(said)}}


def _schema(kind: Any) -> dict[str, Any]:
    ((schema,), _) = msgspec.json.schema_components([kind], ref_template=_REF)
    return dict(schema)


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter, which is left out where JSON would have null."""
    several = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if not several:
        return {name: value for name, value in schema.items() if not (name == "default" and value is None)}
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return {**rest, **several[0]} if len(several) == 1 else {**rest, "anyOf": several}


def _name(kind: Any) -> str:
    return str(_schema(kind)["$ref"]).rpartition("/")[2]
