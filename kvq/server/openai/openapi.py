"""OpenAPI document at `/openapi.json`, with details of the routes that FastAPI cannot infer.

answers.json holds the JSON schemas of responses: the fields that a client may rely on.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from kvq.server.http.guard import MAX_HEADERS, OPEN, is_browsed
from kvq.server.http.ignored import HEADER, ONLY_USUAL
from kvq.server.http.incoming import MAX_BODY
from kvq.server.http.problems import is_messages_path, is_ollama_path

Document = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]  # responses of a route, as FastAPI accepts them
# D320: for the document only; fuzzing validates responses
_ANSWERS = Path(__file__).with_name("answers.json")
_IGNORED: Document = {
    "description": "Fields of the body that are not known here and were ignored, with commas.",
    "schema": {"type": "string"},
}
_WORDS = {
    400: "The request is wrong; the message says where.",
    401: "No API key, or a wrong one.",
    403: "A page of another origin asked, or a key for metrics alone.",
    404: "There is no such path or model.",
    408: "The request did not arrive in time.",
    413: f"A body may have {MAX_BODY} bytes.",
    415: "A body is JSON, and its content type says so.",
    429: "The key's limit is reached.",
    431: f"Headers may have {MAX_HEADERS} bytes together.",
    500: "The server failed.",
    503: "The server can't take requests now.",
    504: "The request did not end in time.",
}
_SECURITY: Document = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "browser": {"type": "http", "scheme": "basic", "description": "The password is the key."},
}


def answer(name: str) -> Responses:
    """Return the responses of a route whose body has the schema `name`."""
    return {200: {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}}


def stream_or(name: str, kind: str = "text/event-stream") -> Responses:
    """Return the responses of a route that sends either a complete body or a stream of this content type."""
    description = "The whole answer, or with `stream` its pieces as they are generated."
    return {200: {"description": description, "content": answer(name)[200]["content"] | {kind: {}}}}


def describe_routes(app: FastAPI, *, has_keys: bool, is_strict: bool) -> None:  # D315
    """Complete the application's OpenAPI document. Call this after adding all routes."""
    app.openapi = partial(_document, app, app.openapi, has_keys, is_strict)  # type: ignore[method-assign]


def _document(app: FastAPI, make: Any, has_keys: bool, is_strict: bool) -> Document:
    if app.openapi_schema is not None:
        return app.openapi_schema
    document: Document = make()
    for path, operation in _operations(document):
        responses = operation["responses"]
        responses.pop("422", None)  # FastAPI's own form of errors, which is not used
        for status in _statuses(path, operation, has_keys):
            responses[str(status)] = _refusal(status, path)
        if "requestBody" in operation:
            responses["200"].setdefault("headers", {})[HEADER] = _IGNORED
        if has_keys:
            ways = [way for way in _SECURITY if way != "browser" or is_browsed(path)]
            operation["security"] = [{way: []} for way in ways if path not in OPEN]
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= json.loads(_ANSWERS.read_text(encoding="utf-8"))
    if is_strict:
        _close(document)
    if has_keys:
        components["securitySchemes"] = _SECURITY
    # Body parts that are private to a module have an underscore in their names, which the document omits
    text = re.sub('"(#/components/schemas/|)_(?=[A-Z])', r'"\1', json.dumps(document))
    document = app.openapi_schema = json.loads(text)
    return document


def _operations(document: Document) -> Iterator[tuple[str, Document]]:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            yield path, operation


def _close(document: Document) -> None:
    """Declare, in every object schema of request bodies, that unknown fields are refused."""
    schemas = dict(document["components"]["schemas"])
    left = _references([operation.get("requestBody") for _, operation in _operations(document)])
    while left:
        if (schema := schemas.pop(left.pop(), None)) is not None:
            left += _references(schema)
            schema.setdefault("additionalProperties", False)
            for field in schema.get("properties", {}).values():
                if field.get("description") == ONLY_USUAL:
                    field["enum"] = [field["default"], None]


def _references(schema: Any) -> list[str]:
    return re.findall('"#/components/schemas/([^"]+)"', json.dumps(schema))


def _statuses(path: str, operation: Document, has_keys: bool) -> Iterator[int]:
    """Yield the status codes that a route may return, except 200."""
    takes_body = "requestBody" in operation
    yield from (400, 403, 408, 413, 431, 500, 503)
    if has_keys and path not in OPEN:
        yield 401
    if takes_body or "{" in path:
        yield 404
    if takes_body:
        yield from (415, 429, 504) if path.startswith(("/v1/", "/api/")) else (415, 429)


def _refusal(status: int, path: str) -> Document:
    name = "MessagesError" if is_messages_path(path) else "OllamaError" if is_ollama_path(path) else "Error"
    found: Document = {"description": _WORDS[status], "content": answer(name)[200]["content"]}
    if status in (429, 503):
        what = "Seconds after which another try may succeed."
        found["headers"] = {"Retry-After": {"description": what, "schema": {"type": "integer"}}}
    return found
