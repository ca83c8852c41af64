"""What the server says of itself is true, and requests made from it, right, wrong and broken, do no harm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fuzz.inside import DOORS
from kvq.models.describe.resolve import EMBEDDED
from kvq.server.admission.prompts import Prompts
from kvq.server.admission.service import Service
from kvq.server.app import create_app
from kvq.server.engine.messages import Start
from kvq.server.engine.remote import Remote
from kvq.server.http.guard import Access
from kvq.server.reading import Readers, Setup
from tests.conftest import QUICKER
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--doors", "http", "--cases", "120"), id="requests"),
        pytest.param(("--doors", ",".join(DOORS), "--cases", "6"), id="inside"),
        pytest.param(("--seconds", "60"), id="all", marks=pytest.mark.long),
    ],
)
def test_what_is_made_up_does_no_harm(tmp_path, options):
    """No traceback, no 5xx, refusals are error objects, nothing is left; see the package."""
    command = [sys.executable, "-m", "benchmarks.fuzz", "--out", str(tmp_path), *options]
    environment = os.environ | {"PYTHONPATH": f"{QUICKER}{os.pathsep}{ROOT}"}
    fuzzed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=HANG_S)
    assert fuzzed.returncode == 0, fuzzed.stdout.decode() + fuzzed.stderr.decode()
    assert (tmp_path / "fuzz-cpu.json").is_file()


@pytest.fixture(scope="module")
def document():
    """Of a server with keys."""
    service = Service(
        "tiny",
        Remote(Start(folder=str(EMBEDDED["tiny"]), kv="int4", options={})),
        Prompts(Readers(Setup(folder="tiny")), None),
    )
    return create_app(service, Access(api_keys=("k",))).openapi()


def test_the_document_tells_which_routes_need_keys(document):
    for path, operations in document["paths"].items():
        for operation in operations.values():
            names = {name for way in operation["security"] for name in way}
            assert names <= set(document["components"]["securitySchemes"])
            assert ("401" in operation["responses"]) == bool(names) == (path != "/health/live")
            assert ("browser" in names) == (path in ("/", "/docs", "/pool", "/page/{name}"))


def test_the_document_tells_errors_as_they_are(document):
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            for status, answer in operation["responses"].items():
                if status != "200":
                    [kind] = answer["content"].values()
                    own = {"/v1/messages": "MessagesError", "/api/": "OllamaError"}
                    name = next((own[begin] for begin in own if path.startswith(begin)), "Error")
                    assert kind["schema"]["$ref"].endswith(f"/{name}")
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_every_field_that_clients_send_has_its_bounds(document):
    """Texts, lists, numbers; what may be anything is bounded by its depth and by the body's length."""
    free = []

    def look(schema, where):
        for one in schema.get("anyOf", [schema]):
            unbounded = {
                "string": not {"maxLength", "enum", "const", "pattern"} & one.keys(),
                "array": "maxItems" not in one,
                "integer": not {"maximum", "exclusiveMaximum"} & one.keys(),
                "number": not {"maximum", "exclusiveMaximum"} & one.keys(),
            }
            if unbounded.get(one.get("type")):
                free.append(where)
            if "items" in one:
                look(one["items"], where + "[]")
            for name, part in one.get("properties", {}).items():
                look(part, f"{where}.{name}")

    sent = [
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for operations in document["paths"].values()
        for operation in operations.values()
        if "requestBody" in operation
    ]
    schemas, seen = document["components"]["schemas"], set()
    while sent:
        name = sent.pop().rpartition("/")[2]
        if name not in seen:
            seen.add(name)
            look(schemas[name], name)
            sent += _references(schemas[name])
    assert len(seen) > 15
    assert free == []


def _references(schema):
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield from [value] if key == "$ref" else _references(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from _references(one)


@pytest.mark.parametrize("name", ["CompletionBody", "ChatBody", "ResponsesBody"])
def test_what_may_be_left_out_may_be_null(document, name):
    """As the server takes it, and as other servers do."""
    schema = document["components"]["schemas"][name]
    for field, says in schema["properties"].items():
        may_be_anything = "anyOf" not in says and "type" not in says and "$ref" not in says
        is_optional = field not in schema["required"]
        assert may_be_anything or ({"type": "null"} in says.get("anyOf", ())) == is_optional, field
