"""Run examples/choose_a_format.ipynb as Jupyter would, and store what it shows; needs no Jupyter.

python -m tools.run_notebook
"""

import ast
import contextlib
import io
import json
import os
import pprint
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "choose_a_format.ipynb"
_NAME = "<cell>"
_STAND_INS = ("IPython", "IPython.display")


class _SVG:
    """Stand-in for IPython.display.SVG."""

    def __init__(self, data: str) -> None:
        self.data = data


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:  # D51
    """The outputs of every code cell, run one after another in the current folder.

    Raises:
        Exception: whatever a cell raises.
    """
    whole, shown, before = (*map(types.ModuleType, _STAND_INS), dict(sys.modules))
    whole.__dict__["version_info"] = (9, 0)  # matplotlib asks for it
    shown.__dict__["SVG"] = _SVG
    sys.modules |= dict(zip(_STAND_INS, (whole, shown), strict=True))
    names: dict[str, Any] = {}
    try:
        return [_outputs(cell, count, names) for count, cell in enumerate(code_cells(notebook), start=1)]
    finally:
        for name in _STAND_INS:
            sys.modules.pop(name)
            if name in before:
                sys.modules[name] = before[name]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that are run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(outputs: list[dict[str, Any]]) -> str:
    """Return the text of outputs, without drawings."""
    texts = [one.get("text", one.get("data", {}).get("text/plain", "")) for one in outputs]
    return "\n".join("".join(text) for text in texts)


def _outputs(cell: dict[str, Any], count: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one cell; returns its output and the value of its last expression."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, _NAME, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _NAME, "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        result = {"execution_count": count, "metadata": {}, "output_type": "execute_result"}
        found.append({"data": _data(value), **result})
    return found


def _data(value: object) -> dict[str, Any]:
    if isinstance(value, _SVG):
        text = {"text/plain": ["<IPython.core.display.SVG object>"]}
        return {"image/svg+xml": value.data.splitlines(keepends=True), **text}
    text = pprint.pformat(value, sort_dicts=False, width=79)
    return {"text/plain": text.splitlines(keepends=True)}


def main() -> None:
    """Run it and write it back."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # where it saves its recipe
        try:
            found = run(notebook)
        finally:
            os.chdir(here)
    for count, (cell, outputs) in enumerate(zip(code_cells(notebook), found, strict=True), start=1):
        cell |= {"execution_count": count, "outputs": outputs}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
