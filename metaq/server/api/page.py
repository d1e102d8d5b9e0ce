"""The API's document as a page of HTML, which needs neither scripts nor the Internet."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

import orjson

_STYLE: Final = """\
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem}
code,pre{font:14px/1.45 ui-monospace,monospace}pre{overflow:auto;padding:.5rem;border:1px solid #8886;border-radius:4px}
summary{cursor:pointer;padding:.3rem 0}summary b{display:inline-block;min-width:4.5rem}table{border-collapse:collapse}
td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0}details{border-bottom:1px solid #8884}"""


def page_of_document(described: Mapping[str, Any]) -> bytes:
    """Return the page of a document."""
    return "".join(_pieces(described)).encode()


def _pieces(described: Mapping[str, Any]) -> Iterator[str]:
    info = described["info"]
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}: REST API</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main>'
    yield f"<h1>REST API of metaq {escape(info['version'])}</h1><p>{escape(info['description'])}</p>"
    yield '<p><a href="/api/openapi.json">openapi.json</a></p>'
    for tag in described["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2>"
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    yield from _operation(method, path, operation)
    yield "<h2>Types</h2>"
    for name, schema in described["components"]["schemas"].items():
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'
    yield "</main></body></html>"


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<details><summary><b>{escape(method.upper())}</b> <code>{escape(path)}</code></summary>"
    yield f"<p>{escape(operation['description'])}</p>"
    if operation["parameters"]:
        yield "<table><tr><th>parameter<th>in<th>what it is"
        for each in operation["parameters"]:
            words = each["schema"].get("description", "")
            yield f"<tr><td><code>{escape(each['name'])}</code><td>{each['in']}<td>{escape(words)}{_json(each['schema'])}"
        yield "</table>"
    if "requestBody" in operation:
        yield f"<p>Body: {_link(operation['requestBody'])}</p>"
    status, answer = next(iter(operation["responses"].items()))
    if "x-sent" in answer:
        yield f"<p>The client sends: {_reference(answer['x-sent'])}</p>"
    yield f"<p>{'Answer' if status == '200' else escape(answer['description'])}: {_link(answer)}</p></details>"


def _link(content: Mapping[str, Any]) -> str:
    ((kind, found),) = content["content"].items()
    return f"<code>{escape(kind)}</code> " + ", ".join(map(_reference, found["schema"].get("anyOf", [found["schema"]])))


def _reference(schema: Mapping[str, Any]) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    return f'<a href="#{escape(name)}">{escape(name)}</a>' if name else escape(schema.get("description", ""))


def _json(value: Any) -> str:
    return f"<pre>{escape(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())}</pre>"
