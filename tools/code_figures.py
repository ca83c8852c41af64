"""What the package's code looks like, in figures: python tools/code_figures.py [--list] [FOLDER]

Lines, modules above 400 lines, how long functions are, how many parameters they take, signatures with
untyped `**options`, and state that modules hold. Functions that run on a device (`@triton.jit`) count as
lines only. `--list` names each place.
"""

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
SOURCES = {".py", ".cpp", ".h", ".js", ".css", ".html"}
MOST_LINES, MOST_PARAMETERS, HARD_LIMIT = 400, 6, 10
_MUTABLE_CALLS = {
    *("dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local"),
}
_CACHES = {"cache", "lru_cache"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Figures:
    """What was counted, and where."""

    lines: int = 0
    modules: list[tuple[int, str]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    parameters: list[tuple[int, str]] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)


def count(folder: Path) -> Figures:
    """The figures of all files below a folder."""
    figures = Figures()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SOURCES):
        text = path.read_text(encoding="utf-8")
        place = str(path.relative_to(folder.parent))
        num_lines = text.count("\n")
        figures.lines += num_lines
        figures.modules.append((num_lines, place))
        if path.suffix == ".py":
            _count_module(ast.parse(text), place, figures)
    return figures


def _count_module(tree: ast.Module, place: str, figures: Figures) -> None:
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        if _has_decorator(function, {"jit"}):
            continue
        where = f"{place}:{function.lineno} {function.name}"
        figures.lengths.append((function.end_lineno or 0) - function.lineno + 1)
        figures.parameters.append((_num_parameters(function.args), where))
        if _has_untyped_options(function.args):
            figures.untyped.append(where)
        if _has_decorator(function, _CACHES):
            figures.state.append(f"{where} (cache)")
    figures.state += [f"{place}:{line} {name}" for line, name in _module_state(tree)]


def _num_parameters(args: ast.arguments) -> int:
    named = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def _has_untyped_options(args: ast.arguments) -> bool:
    if args.kwarg is None:
        return False
    annotation = args.kwarg.annotation
    return annotation is None or (isinstance(annotation, ast.Name) and annotation.id in ("Any", "object"))


def _has_decorator(function: Function, names: set[str]) -> bool:
    return any(_last_name(decorator) in names for decorator in function.decorator_list)


def _module_state(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names of a module that hold something that can change, and names that functions set anew."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        value = getattr(node, "value", None)
        for target in targets:
            # A table written out in full is a constant; one that begins empty is there to be filled.
            is_empty = isinstance(value, ast.Dict | ast.List) and not ast.dump(value).count("Constant")
            is_made = isinstance(value, ast.Call) and _last_name(value) in _MUTABLE_CALLS and not value.args
            if isinstance(target, ast.Name) and target.id != "__all__" and (is_empty or is_made):
                yield node.lineno, target.id
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def _last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def rows(figures: Figures) -> list[tuple[str, str, list[str]]]:
    """What, how much, and where."""
    large = [f"{place}: {lines}" for lines, place in figures.modules if lines > MOST_LINES]
    many = [f"{where}: {number}" for number, where in figures.parameters if number > MOST_PARAMETERS]
    too_many = [f"{where}: {number}" for number, where in figures.parameters if number > HARD_LIMIT]
    return [
        ("lines", f"{figures.lines:,}", []),
        ("modules", f"{len(figures.modules)}", []),
        (f"modules above {MOST_LINES} lines", f"{len(large)}", large),
        ("functions", f"{len(figures.lengths):,}", []),
        ("lines of a function, median", f"{median(figures.lengths):.0f}", []),
        ("lines of a function, 95th percentile", f"{quantiles(figures.lengths, n=20)[-1]:.0f}", []),
        (f"functions with more than {MOST_PARAMETERS} parameters", f"{len(many)}", many),
        (f"functions with more than {HARD_LIMIT} parameters", f"{len(too_many)}", too_many),
        ("signatures with untyped **options", f"{len(figures.untyped)}", figures.untyped),
        ("state and caches of modules", f"{len(figures.state)}", figures.state),
    ]


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "kvq")
    parser.add_argument("--list", action="store_true", help="name each place")
    given = parser.parse_args()
    print("| what | |\n|---|--:|")
    for what, number, places in rows(count(given.folder.resolve())):
        print(f"| {what} | {number} |")
        for place in places if given.list else ():
            print(f"| - {place} | |")


if __name__ == "__main__":
    main()
