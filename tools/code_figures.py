"""What the package's code looks like, in figures: python tools/code_figures.py [--list | --update] [FOLDER]

Lines, modules above 400 lines, how long functions are, how many parameters they take, signatures with
untyped `**options`, state that modules hold, files in a folder, public classes, those called alike in one
folder, circles of imports inside a folder, docstrings that begin with a headless clause ("What ..."),
and names with words that the field does not use (`tests/foreign_words.json`). Functions that run on a device
(`@triton.jit`) count as lines only. `--list` names each place. `--update` compares the figures with
`tests/code_figures.json`, as `make test` does: worse ones are printed and change nothing there, better ones
are written down and are the limits from then on.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
SOURCES = {".py", ".cpp", ".h", ".ptx", ".js", ".css", ".html"}
LIMITS = ROOT / "tests" / "code_figures.json"
FOREIGN_WORDS = ROOT / "tests" / "foreign_words.json"  # each with the field's word for it
MOST_LINES, MOST_PARAMETERS, HARD_LIMIT, LONG, MOST_FILES = 400, 6, 10, 60, 15
MOST_TOLD = 12  # places of one gauge in a message
MOST_OF_KERNELS = 30  # parameters of a Triton function
_MUTABLE_CALLS = {
    *("dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local"),
}
_DEPTHS = {"headless docstrings": 2}
_CACHES = {"cache", "lru_cache"}
# First words of a docstring that has no subject or verb of its own
_HEADLESS = {
    *("what", "who", "whose", "which", "how", "whether", "where", "when", "why", "of", "beside", "as", "by"),
    *("its", "those", "that", "so", "from"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


@dataclass
class Figures:
    """What was counted, and where."""

    lines: int = 0
    python_lines: int = 0
    modules: list[tuple[int, str]] = field(default_factory=list)
    folders: Counter[str] = field(default_factory=Counter)  # of Python files that lie right in them
    lengths: list[tuple[int, str]] = field(default_factory=list)
    parameters: list[tuple[int, str]] = field(default_factory=list)
    kernel_parameters: list[tuple[int, str]] = field(default_factory=list)  # of Triton functions
    untyped: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    docstrings: int = 0
    headless: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    imports: dict[str, set[str]] = field(default_factory=dict)  # of a module, by its dotted name


@dataclass(frozen=True)
class Gauge:
    """A figure that may fall and never rise, and the places that make it up."""

    name: str
    value: int
    places: list[str]  # "kvq/folder/file.py:12 name: 7"
    depth: int | None = None  # folders by which places are stored, if their files are too many

    def counts(self) -> dict[str, int]:
        """How many places each file (or folder) has."""
        return dict(sorted(Counter(map(self.file_of, self.places)).items()))

    def file_of(self, place: str) -> str:
        """The file (or folder) that a place counts for."""
        return "/".join(place.partition(":")[0].split("/")[: self.depth])


def count(folder: Path) -> Figures:
    """The figures of all files below a folder."""
    figures = Figures()
    words = set(json.loads(FOREIGN_WORDS.read_text(encoding="utf-8")))
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SOURCES):
        text = path.read_text(encoding="utf-8")
        place = str(path.relative_to(folder.parent))
        num_lines = text.count("\n")
        figures.lines += num_lines
        figures.modules.append((num_lines, place))
        if path.suffix == ".py":
            figures.python_lines += num_lines
            figures.folders[str(path.relative_to(folder.parent).parent)] += 1
            tree = ast.parse(text)
            _count_module(tree, place, figures)
            _count_words(tree, place, figures, words)
            figures.imports[dotted(place)] = set(_imports(tree))
    return figures


def dotted(place: str) -> str:
    """Return the dotted name of the module in a file."""
    return place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _count_module(tree: ast.Module, place: str, figures: Figures) -> None:
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        where = f"{place}:{function.lineno} {function.name}"
        if _has_decorator(function, {"jit"}):
            figures.kernel_parameters.append((_num_parameters(function.args), where))
            continue
        figures.lengths.append(((function.end_lineno or 0) - function.lineno + 1, where))
        figures.parameters.append((_num_parameters(function.args), where))
        if _has_untyped_options(function.args):
            figures.untyped.append(where)
        if _has_decorator(function, _CACHES):
            figures.state.append(f"{where} (cache)")
    figures.state += [f"{place}:{line} {name}" for line, name in _module_state(tree)]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    figures.classes += [f"{place}:{one.lineno} {one.name}" for one in classes if not one.name.startswith("_")]


def _count_words(tree: ast.Module, place: str, figures: Figures, words: set[str]) -> None:
    """Count docstrings, those without a head, and names with one of the words."""
    named = [(1, Path(place).stem, "the module")]
    for node in (node for node in ast.walk(tree) if isinstance(node, Documented)):
        where = (node.lineno, node.name) if not isinstance(node, ast.Module) else (1, "the module")
        if text := ast.get_docstring(node):
            figures.docstrings += 1
            if _is_headless(text):
                figures.headless.append(f"{place}:{where[0]} {where[1]}")
        if not isinstance(node, ast.Module):
            named.append((node.lineno, node.name, node.name))
    for line, name, told in named:
        if words & {part.lower() for part in re.findall("[A-Z]?[a-z0-9]+", name)}:
            figures.foreign.append(f"{place}:{line} {told}")


def _is_headless(docstring: str) -> bool:
    first = docstring.split(maxsplit=2)
    return first[0].lower() in _HEADLESS or [word.lower() for word in first[:2]] == ["the", "same"]


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules and folders of one folder that import each other in a loop, as places."""
    found = []
    folders = {name.rpartition(".")[0] for name in imports} - {""}
    for folder in sorted(folders):
        graph: dict[str, set[str]] = {}
        for module, targets in imports.items():
            if module.startswith(f"{folder}."):
                own = _child(module, folder)
                inside = {_child(target, folder) for target in targets if target.startswith(f"{folder}.")}
                graph.setdefault(own, set()).update(inside - {own})
        reached = {name: _reached(name, graph) for name in graph}
        found += [f"{folder.replace('.', '/')}: {name}" for name in sorted(graph) if name in reached[name]]
    return found


def _child(module: str, folder: str) -> str:
    return module[len(folder) + 1 :].partition(".")[0]


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name in graph and name not in reached:
            reached.add(name)
            left += graph[name]
    return reached


def _called_alike(classes: list[str]) -> list[str]:
    """Return the places of public classes of which one folder has several of one name."""
    seen = Counter((str(Path(place.partition(":")[0]).parent), place.split()[-1]) for place in classes)
    return [
        place for place in classes if seen[str(Path(place.partition(":")[0]).parent), place.split()[-1]] > 1
    ]


def _num_parameters(args: ast.arguments) -> int:
    named = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def _has_untyped_options(args: ast.arguments) -> bool:
    if args.kwarg is None:
        return False
    annotation = args.kwarg.annotation
    said = "" if annotation is None else ast.unparse(annotation).strip("'\"").removeprefix("typing.")
    return said in ("", "Any", "object")


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


def gauges(figures: Figures) -> list[Gauge]:
    """What may not get worse; lines have a budget instead."""
    lengths = [number for number, _ in figures.lengths] * 2  # quantiles of one function, too
    longest = max(figures.folders.values())
    flat = [f"{folder}: {number}" for folder, number in figures.folders.items() if number == longest]
    folders = [f"{folder}: {number}" for folder, number in figures.folders.items() if number > MOST_FILES]
    found = {
        f"modules above {MOST_LINES} lines": _above(MOST_LINES, figures.modules),
        f"functions above {LONG} lines": _above(LONG, figures.lengths),
        f"functions with more than {MOST_PARAMETERS} parameters": _above(MOST_PARAMETERS, figures.parameters),
        f"functions with more than {HARD_LIMIT} parameters": _above(HARD_LIMIT, figures.parameters),
        f"kernels with more than {MOST_OF_KERNELS} parameters": _above(
            MOST_OF_KERNELS, figures.kernel_parameters
        ),
        "signatures with untyped **options": figures.untyped,
        "state and caches of modules": figures.state,
        f"folders with more than {MOST_FILES} Python files": folders,
        "modules in circles of imports": circles(figures.imports),
        "public classes called alike in one folder": _called_alike(figures.classes),
        "headless docstrings": figures.headless,
        "names with words that the field does not use": figures.foreign,
    }
    return [
        Gauge("lines of a function, median", round(median(lengths)), []),
        Gauge("lines of a function, 95th percentile", round(quantiles(lengths, n=20)[-1]), []),
        *(Gauge(name, len(places), places, _DEPTHS.get(name)) for name, places in found.items()),
        Gauge("parameters of the largest kernel", *_largest(figures.kernel_parameters)),
        Gauge("Python files in the largest folder", longest, flat),
        Gauge("public classes", len(figures.classes), figures.classes, depth=2),
    ]


def _largest(counted: list[tuple[int, str]]) -> tuple[int, list[str]]:
    most = max((number for number, _ in counted), default=0)
    return most, [f"{where}: {number}" for number, where in counted if number == most]


def _above(limit: int, counted: list[tuple[int, str]]) -> list[str]:
    return [f"{where}: {number}" for number, where in counted if number > limit]


def worse(figures: Figures, limits: dict) -> list[str]:
    """What of the figures is worse than the limits, each with the places that moved it."""
    budget = limits["lines"]["budget"]
    told = []
    if figures.python_lines > budget:
        told.append(
            f"lines: {figures.python_lines:,} of Python, the budget is {budget:,}: replace before you add, "
            "and delete what nothing uses; a change that needs more raises the budget by an amount it states"
        )
    for gauge in gauges(figures):
        before = limits.get(gauge.name)
        if before is not None and gauge.value > before["value"]:
            places = "".join(f"\n  {place}" for place in _moved(gauge, before.get("places", {})))
            told.append(f"{gauge.name}: {before['value']:,} -> {gauge.value:,}{places}")
    return told


def _moved(gauge: Gauge, before: dict[str, int]) -> list[str]:
    """The places of files that have more of them than before; all, where that is none."""
    risen = {name: number for name, number in gauge.counts().items() if number > before.get(name, 0)}
    told = [f"{name}: {before.get(name, 0)} -> {number}" for name, number in risen.items()]
    now = [place for place in gauge.places if not risen or gauge.file_of(place) in risen]
    return told + (now if len(now) <= MOST_TOLD else [f"and {len(now)} places; --list names them"])


def ratchet(figures: Figures, limits: Path) -> list[str]:
    """Tell what got worse; if nothing did, write the figures down as the limits, where that is possible."""
    stored = limits.read_text(encoding="utf-8")
    before = json.loads(stored)
    told = worse(figures, before)
    after: dict = {"lines": before["lines"]}
    for gauge in gauges(figures):
        after[gauge.name] = {"value": gauge.value, **({"places": gauge.counts()} if gauge.places else {})}
    text = json.dumps(after, indent=2) + "\n"
    if not told and text != stored:
        try:
            limits.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"{limits} can't be written, and stays as it is: {error}", file=sys.stderr)
    return told


def rows(figures: Figures) -> list[tuple[str, int, list[str]]]:
    """What, how much, and where."""
    counted = [
        ("lines", figures.lines),
        ("lines of Python", figures.python_lines),
        ("modules", len(figures.modules)),
        ("functions", len(figures.lengths)),
        ("docstrings", figures.docstrings),
    ]
    held = [(gauge.name, gauge.value, gauge.places) for gauge in gauges(figures)]
    return [*((what, number, []) for what, number in counted), *held]


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "kvq")
    parser.add_argument("--list", action="store_true", help="name each place")
    parser.add_argument("--update", action="store_true", help=f"hold against {LIMITS.relative_to(ROOT)}")
    given = parser.parse_args()
    figures = count(given.folder.resolve())
    print("| what | |\n|---|--:|")
    for what, number, places in rows(figures):
        print(f"| {what} | {number:,} |")
        for place in places if given.list else ():
            print(f"| - {place} | |")
    if given.update and (told := ratchet(figures, LIMITS)):
        sys.exit("\n".join(told))


if __name__ == "__main__":
    main()
