"""`import kvq` opens nothing but Python's own imports, and deciding needs no tensors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_S

HEAVY = ("torch", "transformers", "numpy", "safetensors", "click", "rich", "triton")

WATCHED = """
import json, sys
events = []
active = False

def hook(name, args):
    if not active or len(events) > 10_000:
        return
    if name == "open":
        events.append([name, str(args[0]), str(args[1])])
    elif name.split(".")[0] in ("socket", "subprocess", "os", "ctypes", "urllib", "shutil", "tempfile"):
        events.append([name, str(args[0]) if args else "", ""])

sys.addaudithook(hook)
active = True
{statement}
active = False
print(json.dumps([events, sorted(sys.modules), sys.path]))
"""


def run(statement: str, *flags: str) -> tuple[list[list[str]], list[str], list[str]]:
    """Run `statement` in a fresh interpreter: audit events, loaded modules, and sys.path."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", WATCHED.replace("{statement}", statement)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    events, modules, path = json.loads(done.stdout)
    return events, modules, path


def is_import_of_python(path: str, roots: list[str]) -> bool:
    """True for source or byte code of a module below one of the places that Python imports from."""
    file = Path(path)
    return file.suffix in (".py", ".pyc") and any(file.is_relative_to(root) for root in roots if root)


def test_import_kvq_opens_no_file_but_pythons_own_imports() -> None:
    events, modules, path = run("import kvq")
    import kvq

    home = str(Path(kvq.__file__).parent)
    opened = [event for event in events if event[0] == "open"]
    assert any(event[1].startswith(home) for event in opened)  # the hook does see the import
    for _, file, mode in opened:
        assert is_import_of_python(file, [home, *path]), file
        assert not set(mode) & set("wax+") or "__pycache__" in file, f"{file} opened for {mode}"
    loaded = [m for m in modules if m.partition(".")[0] in HEAVY]
    assert not loaded


def test_import_kvq_starts_no_process_and_opens_no_socket() -> None:
    events, modules, _ = run("import kvq", "-B")
    names = {event[0] for event in events}
    assert names <= {"open", "os.listdir", "os.scandir"}, names  # finders list folders to find modules
    assert not {"socket", "subprocess", "ssl", "ctypes", "multiprocessing"} & set(modules)


@pytest.mark.parametrize(
    "statement",
    [
        "import pathlib; pathlib.Path('{file}').read_text()",
        "open('{file}').close()",
        "import os; os.close(os.open('{file}', 0))",
    ],
)
def test_the_audit_would_notice_a_file_that_is_no_import(statement: str, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    events, _, path = run(statement.replace("{file}", str(tmp_path / "settings.json")))
    assert not all(is_import_of_python(event[1], path) for event in events if event[0] == "open")


@pytest.mark.parametrize(
    "module", ["kvq.errors", "kvq.fileio", "kvq.formats", "kvq.geometry", "kvq.layout", "kvq.blockmgr"]
)
def test_deciding_and_sizing_import_no_tensors(module: str) -> None:
    _, modules, _ = run(f"import {module}")
    assert module in modules
    assert not [m for m in modules if m.partition(".")[0] in HEAVY]


def test_processes_without_a_model_import_neither_torch_nor_the_engine() -> None:
    """The HTTP process, the one that reads prompts, and those of the commands that start them."""
    modules = "kvq.server.run, kvq.server.reading.host, kvq.server.batch.run"
    _, loaded, _ = run(
        f"import kvq.commands.use.serve, kvq.commands.use.run_batch, kvq.commands.shared.terminal, {modules}"
    )
    assert "fastapi" in loaded
    heavy = ("torch", "transformers", "numpy", "triton", "safetensors", "huggingface_hub")
    assert not [m for m in loaded if m.partition(".")[0] in heavy]
    assert not {
        "kvq.engine.steps.core",
        "kvq.engine.requests.request_state",
        "kvq.models.model",
        "kvq.kernels",
    } & set(loaded)


def test_errors_and_version_come_without_torch_and_names_on_first_use() -> None:
    statement = "import kvq; kvq.ConfigError, kvq.__version__, dir(kvq), kvq.KVRecipe"
    _, modules, _ = run(statement)
    assert "kvq.formats" in modules
    assert not [m for m in modules if m.partition(".")[0] in HEAVY]
    import kvq

    assert kvq.KVRecipe is sys.modules["kvq.formats"].KVRecipe
    with pytest.raises(AttributeError, match="module 'kvq' has no attribute 'laod'"):
        _ = kvq.laod
