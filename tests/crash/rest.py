"""Requests that the document of the REST API allows, and others that are nearly so, against a real broker.

The document says of each operation which parameters and which body it takes. A request has values that fit it, drawn from
names that exist and values at the limits; or one of them is replaced by something else; or the body is bytes. What must hold:
no answer has a status of 500, nor one that stands for an error of the broker; each is what the document says an answer to this
operation is, in its type and its form; the process lives, is ready, and prints no traceback.

``python -m tests.crash.rest --seed 7 --count 50000`` runs it; a failure prints the request.
"""

import json
import random
import string
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.crash.attack import main
from tests.crash.command import Result, expect
from tests.support.broker import BrokerProcess
from tests.support.rest import Rest, RestAnswer

NAMES: Final = ("t1", "t2", "g1", "g2", "%RETRY%g1", "%DLQ%g1", "TBW102", "SCHEDULE_TOPIC_XXXX", "nothing", "ä b", "*", "")
FLAGS: Final = ("--max-topics", "100", "--max-groups", "100", "--max-message-bytes", "65536", "--max-hold-ms", "5")
LEFT_OUT: Final = frozenset({"hand_over", "change_settings"})
"""Operations after which the broker would be another one."""
ODD: Final[tuple[Any, ...]] = (None, True, -1, 1 << 63, 1.5, "", "x" * 5000, [], [[]], {}, {"a": 1}, "\x00", "\ud7ff", "null")
MOST_WAIT_MS: Final = 2
DOCUMENT: Final = "urn:metaq:api"
TOO_LONG: Final = 414
BROKEN: Final = frozenset({500, 502, 504})


class Requests:
    """Draws requests of a document, and checks their answers."""

    def __init__(self, document: Mapping[str, Any], chance: random.Random) -> None:
        self._chance = chance
        self._schemas = document["components"]["schemas"]
        self._seen: dict[str, list[str]] = {"offset_id": [], "handle": [], "receipt": [], "key": []}
        resource = Resource.from_contents(document, default_specification=DRAFT202012)
        self._registry: Registry[Any] = Registry().with_resource(DOCUMENT, resource)
        self.operations = [
            (method.upper(), path, described)
            for path, methods in document["paths"].items()
            for method, described in methods.items()
            if described["operationId"] not in LEFT_OUT and "text/event-stream" not in _contents(described)
        ]

    def draw(self) -> tuple[str, str, bytes | None, dict[str, Any]]:
        """Return the method, path and body of a request, and the operation that it is of."""
        chance = self._chance
        method, path, described = chance.choice(self.operations)
        query = {}
        for each in described["parameters"]:
            value = self._value(each["name"], each["schema"])
            if chance.random() < 0.05:
                value = chance.choice(ODD)
            if each["in"] == "path":
                path = path.replace(f"{{{each['name']}}}", quote(_text(value), safe="") or "-")
            elif chance.random() < 0.5:
                query[each["name"]] = _text(value)
        if chance.random() < 0.02:
            query[chance.choice(("extra", "limit"))] = _text(chance.choice(ODD))
        body = None
        if "requestBody" in described:
            body = self._body(described["requestBody"]["content"]["application/json"]["schema"])
        return method, f"{path}?{urlencode(query)}" if query else path, body, described

    def _body(self, schema: Mapping[str, Any]) -> bytes:
        chance = self._chance
        content = self._value("", schema)
        if isinstance(content, dict) and content and chance.random() < 0.15:
            content[chance.choice([*content, "extra"])] = chance.choice(ODD)
        data = json.dumps(content).encode()
        if chance.random() < 0.05:
            at = chance.randrange(len(data) + 1)
            data = data[:at] + chance.randbytes(chance.randrange(3)) + data[at + chance.randrange(3) :]
        return data

    def _value(self, name: str, schema: Mapping[str, Any]) -> Any:
        """Return a value of a schema; ``name`` is that of the field it is for."""
        chance = self._chance
        if "$ref" in schema:
            return self._value(name, self._schemas[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return self._value(name, chance.choice(schema["anyOf"]))
        if "enum" in schema:
            return chance.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema)
            case "array":
                most = min(schema.get("maxItems", 4), 4)
                return [self._value(name, schema["items"]) for _ in range(chance.randint(schema.get("minItems", 0), most))]
            case "integer" | "number":
                return self._number(name, schema)
            case "boolean":
                return chance.random() < 0.5
            case "string":
                return self._string(name, schema)
        return None

    def _object(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        chance, required = self._chance, schema.get("required", ())
        fields = schema.get("properties", {})
        found = {name: self._value(name, each) for name, each in fields.items() if name in required or chance.random() < 0.4}
        if "additionalProperties" in schema and isinstance(schema["additionalProperties"], dict):
            keys = [chance.choice(("0", "1", "max_in_flight", "order", "a", "")) for _ in range(chance.randint(1, 3))]
            found |= {key: self._value("", schema["additionalProperties"]) for key in keys}
        return found

    def _number(self, name: str, schema: Mapping[str, Any]) -> int:
        least, most = schema.get("minimum", -(1 << 63)), schema.get("maximum", (1 << 63) - 1)
        if "wait" in name:
            most = MOST_WAIT_MS
        if name in ("partitions", "limit"):
            most = min(most, 32)
        drawn: int = self._chance.choice((least, min(most, least + self._chance.randrange(5)), most))
        return drawn

    def _string(self, name: str, schema: Mapping[str, Any]) -> str:
        chance = self._chance
        known = self._seen.get(name)
        if known and chance.random() < 0.8:
            return chance.choice(known)
        least, most = schema.get("minLength", 0), min(schema.get("maxLength", 40), 40)
        noise = "".join(chance.choices(string.printable + "äß\u0416\U0001f600", k=chance.randint(least, most)))
        return chance.choice((chance.choice(NAMES), chance.choice(NAMES[:4]), noise))

    def check(self, request: object, answer: RestAnswer, described: Mapping[str, Any]) -> None:
        """Raise ``Violation`` when an answer is not one that the document has."""
        expect(answer.status not in BROKEN, "an error of the broker", request, answer)
        if answer.status == TOO_LONG and not answer.data:
            return  # the server has refused the first line, so nobody knows which operation it names
        responses = described["responses"]
        contents = responses.get(str(answer.status), responses["default"])["content"]
        kind = answer.headers.get("content-type", "").partition(";")[0]
        expect(kind in contents, "a type that the document does not have", request, answer)
        content = json.loads(answer.data)
        pointer = contents[kind]["schema"]["$ref"]
        errors = list(Draft202012Validator({"$ref": DOCUMENT + pointer}, registry=self._registry).iter_errors(content))
        expect(not errors, "an answer that the document does not have", request, answer, [error.message for error in errors])
        if kind == "application/problem+json":
            expect(content["status"] == answer.status, "another status in the problem", request, answer)
        self._learn(content)

    def _learn(self, content: Any) -> None:
        """Remember ids, handles and receipts, which later requests use."""
        if isinstance(content, list):
            for each in content[:3]:
                self._learn(each)
        elif isinstance(content, dict):
            for name, value in content.items():
                if name in self._seen and isinstance(value, str):
                    self._seen[name] = [*self._seen[name][-20:], value]
                elif isinstance(value, (dict, list)):
                    self._learn(value)


def _contents(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The forms of an operation's answer; a WebSocket has none, and without its handshake it is refused."""
    found: Mapping[str, Any] = described["responses"].get("200", {}).get("content", {})
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value)


def run(seed: int, count: int) -> Result:
    """Send ``count`` requests; raise ``Violation`` when something does not hold."""
    statuses: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, BrokerProcess(Path(folder) / "data", *FLAGS) as broker:
        with Rest(broker.http) as rest:
            requests = Requests(rest.send("GET", "/api/openapi.json").content, random.Random(seed))
            for _ in range(count):
                method, path, body, described = requests.draw()
                answer = rest.send(method, path, body)
                requests.check((method, path, body), answer, described)
                statuses[f"of {answer.status}"] += 1
            expect(rest.get("/broker")["ready"], "the broker is not ready any more")
        expect(broker.running, "the broker has ended", broker.stderr()[-4000:])
        expect("Traceback" not in broker.stderr(), "a traceback", broker.stderr()[-4000:])
    return Result("rest", range(seed, seed + 1), sum(statuses.values()), dict(statuses))


if __name__ == "__main__":
    main(run, 50_000)
