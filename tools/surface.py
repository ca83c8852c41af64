"""List of every name that users type or scripts read: python tools/surface.py [--update]

Commands and their options, the options of other engines that are understood, routes and the fields of their
bodies and answers, metrics, KV formats, names that a documented package exports with their methods and
parameters, extras, entry points, make targets. `tests/surface.json` holds the list; `make test` fails when a
name of it is gone, and `--update` adds the new ones.
"""

import argparse
import dataclasses
import importlib
import inspect
import json
import re
import tomllib
import typing
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kvq.errors import ConfigError

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests" / "surface.json"
PACKAGES = {  # with the names of which methods and parameters are listed, too
    "kvq": None,  # all
    "kvq.blockmgr": (),
    "kvq.cache": ("KvqCache", "load_prefix", "save_prefix"),
    "kvq.calib": (),
    "kvq.engine": None,
    "kvq.evals": None,
    "kvq.formats": ("KVRecipe",),
    "kvq.integrations.ray": None,
    "kvq.kernels": ("AttentionOptions", "SequenceBatch"),
    "kvq.kernels.ops": None,
    "kvq.models": (),
    "kvq.watermark": None,
    "kvq.weights": (),
}
MAX_DEPTH = 3  # of fields within fields


def surface() -> dict[str, list[str]]:
    """Return every name, sorted, by what kind of thing it names."""
    found = {
        "commands": _commands(),
        "other engines' options": _foreign(),
        "routes": _routes(),
        "metrics": _metrics(),
        "formats": _formats(),
        "python": _python(),
        "packaging": _packaging(),
    }
    return {kind: sorted(set(names)) for kind, names in found.items()}


def _commands() -> Iterator[str]:
    from kvq.cli import root

    yield from _of_command(root, click.Context(root), "kvq")


def _of_command(command: click.Command, context: click.Context, path: str) -> Iterator[str]:
    yield path
    for param in command.params:
        kind = param.type
        for spelling in (*param.opts, *param.secondary_opts):
            yield f"{path} {spelling}"
            if isinstance(kind, click.Choice):
                yield from (f"{path} {spelling} {choice}" for choice in kind.choices)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield from _of_command(inner, click.Context(inner, parent=context), f"{path} {name}")


def _foreign() -> Iterator[str]:
    from kvq.commands.shared import foreign

    for entry in json.loads(Path(foreign.__file__).with_name("foreign.json").read_text(encoding="utf-8")):
        for name in entry["names"]:
            yield name
            yield from (f"{name} {value}" for value in entry.get("values", {}))


def _routes() -> Iterator[str]:
    document = _document()
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            route = f"{verb.upper()} {path}"
            yield route
            taken = operation.get("requestBody", {}).get("content", {})
            answered = operation["responses"].get("200", {}).get("content", {})
            for arrow, contents in (("<-", taken), ("->", answered)):
                schema = contents.get("application/json", {}).get("schema", {})
                yield from (f"{route} {arrow} {field}" for field in _fields(schema, document, MAX_DEPTH))


def _document() -> dict[str, Any]:
    from kvq.models.describe.resolve import EMBEDDED
    from kvq.server.admission.prompts import Prompts
    from kvq.server.admission.service import Service
    from kvq.server.app import create_app
    from kvq.server.engine.messages import Start
    from kvq.server.engine.remote import Remote
    from kvq.server.reading import Readers, Setup

    remote = Remote(Start(folder=str(EMBEDDED["tiny"]), kv="int4", options={}))
    return create_app(Service("tiny", remote, Prompts(Readers(Setup(folder="tiny")), None))).openapi()


def _fields(schema: dict[str, Any], document: dict[str, Any], depth: int) -> Iterator[str]:
    """Names of an object's fields, with dots between those of objects within."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for name, field in schema.get("properties", {}).items():
        yield name
        if depth > 1:
            yield from (f"{name}.{inner}" for inner in _fields(field, document, depth - 1))
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key, ()):
            yield from _fields(option, document, depth)
    if isinstance(schema.get("items"), dict):
        yield from _fields(schema["items"], document, depth)


def _metrics() -> Iterator[str]:
    from kvq.server.admission.metric_names import ALL_NAMES

    for names in ALL_NAMES.values():
        yield from (f"{names.ends.name}{{{label}}}" for label in names.ends.labels)
        yield from (f"{names.ends.name} {status}" for status in names.endings.values())
        yield from (shape.name for shape in names.observed.values())
        called = [one for _, one in names.totals]
        for one in (*called, *names.gauges.values(), *names.block_times.values()):
            yield one.name
            yield from (f"{one.name}{{{label}}}" for label in one.labels)


def _formats() -> Iterator[str]:
    from kvq.formats.names import known_names

    yield from known_names()


def _python() -> Iterator[str]:
    for package, detailed in PACKAGES.items():
        module = importlib.import_module(package)
        for name in module.__all__:
            yield f"{package}.{name}"
            with suppress(ConfigError):  # as where Ray is not installed
                if detailed is None or name in detailed:
                    yield from _of_object(f"{package}.{name}", getattr(module, name))


def _of_object(path: str, value: Any) -> Iterator[str]:
    """Parameters of a function; fields, methods and their parameters of a class."""
    if inspect.isclass(value):
        if dataclasses.is_dataclass(value):
            yield from (f"{path}.{field.name}" for field in dataclasses.fields(value) if field.init)
        else:
            yield from _parameters(path, value.__init__)
        for name, member in inspect.getmembers_static(value):
            is_own = any(name in base.__dict__ for base in value.__mro__ if base.__module__.startswith("kvq"))
            if is_own and not name.startswith("_"):
                yield f"{path}.{name}"
                member = getattr(member, "__func__", member)
                if inspect.isfunction(member):
                    yield from _parameters(f"{path}.{name}", member)
    elif callable(value):
        yield from _parameters(path, value)


def _parameters(path: str, function: Any) -> Iterator[str]:
    try:
        named = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of C
        return
    yield from (f"{path}({name})" for name in named if name not in ("self", "cls") and name[0] != "_")
    for parameter in named.values():
        if typing.get_origin(parameter.annotation) is typing.Unpack:  # **options: Unpack[Fields]
            yield from (
                f"{path}({name})" for name in typing.get_args(parameter.annotation)[0].__annotations__
            )


def _packaging() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from (f"extra {name}" for name in project["optional-dependencies"])
    for group, points in project["entry-points"].items():
        yield from (f"entry point {group} {name}" for name in points)
    targets = re.findall(r"^#   make ([a-z-]+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    yield from (f"make {name}" for name in targets)


def main() -> None:
    """Tell what is gone and what is new; write what is new down if told to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help=f"add new names to {STORED.relative_to(ROOT)}")
    given = parser.parse_args()
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    found = surface()
    for kind, names in found.items():
        before = set(stored.get(kind, ()))
        for mark, changed in (("gone", before - set(names)), ("new", set(names) - before)):
            for name in sorted(changed):
                print(f"{mark}: {kind}: {name}")
    if given.update:
        merged = {kind: sorted({*names, *stored.get(kind, ())}) for kind, names in found.items()}
        STORED.write_text(json.dumps(merged, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
