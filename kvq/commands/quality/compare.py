"""`kvq compare`: two results of `kvq perplexity` or `kvq eval` side by side."""

import math
from typing import Any

import click

from kvq.commands.shared.param_types import TO_READ, TO_WRITE
from kvq.commands.shared.results import write_rows
from kvq.commands.shared.terminal import console, text_table, warn
from kvq.printable import one_line

_PERCENT = ("perplexity_change", "top1_agreement", "top5_agreement", "identical")


@click.command(name="compare")
@click.argument("a", type=TO_READ)
@click.argument("b", type=TO_READ)
@click.option("--json", "json_path", type=TO_WRITE, help="Write the differences as JSON.")
def command(a: str, b: str, json_path: str | None) -> None:
    """Compare two JSON results A and B, both of `kvq perplexity` or both of `kvq eval`, format by format.

    Differences are B's figures minus A's. Reasons why figures can't be compared are printed first.
    """
    from kvq import fileio
    from kvq.evals.report.compare import compare, read_result

    results = read_result(a), read_result(b)
    if json_path is not None:
        fileio.check_writable(json_path)
    found = compare(*results)
    _print((a, b), results, found)
    _write(json_path, (a, b), results, found)


def _print(paths: tuple[str, str], results: tuple[Any, Any], found: dict[str, Any]) -> None:
    for warning in found["warnings"]:
        warn(warning)
    out = console()
    for name, path, result in zip("AB", paths, results, strict=True):
        out.print(
            one_line(
                f"{name}  {path}: {result['model']}, {result['text']}, windows of {result['context']}, "
                f"{result['date']}, commit {result.get('commit')}"
            )
        )
    for section in dict.fromkeys(one["section"] for one in found["rows"]):
        shown = [one for one in found["rows"] if one["section"] == section]
        figures = list(dict.fromkeys(one["figure"] for one in shown))
        rows = list(dict.fromkeys((one["kv"], one["where"]) for one in shown))
        cells = {(one["kv"], one["where"], one["figure"]): _cell(one) for one in shown}
        out.print(f"\n{'per format' if section == 'rows' else section}: A, B (B - A)", style="bold")
        table = [
            [", ".join(filter(None, row)), *(cells.get((*row, figure), "-") for figure in figures)]
            for row in rows
        ]
        out.print(text_table(("kv", *figures), table))
    if not all(map(_overlap, found["rows"])):
        out.print("!  the 95% intervals don't overlap")
    for name in "AB":
        if labels := found[f"only_in_{name.lower()}"]:
            out.print(f"\nonly in {name}: {one_line('; '.join(labels))}")


def _cell(one: dict[str, Any]) -> str:
    form = ".3%" if one["figure"] in _PERCENT else ",.5g"
    a, b = one["a"], one["b"]
    change = 0.0 if math.isclose(a, b, rel_tol=1e-9) else one["difference"]
    return f"{a:{form}}, {b:{form}} ({change:+{form}}){'' if _overlap(one) else ' !'}"


def _overlap(one: dict[str, Any]) -> bool:
    a, b = one["a_interval"], one["b_interval"]
    return a is None or b is None or (a[0] <= b[1] and b[0] <= a[1])


def _write(path: str | None, paths: tuple[str, str], results: tuple[Any, Any], found: dict[str, Any]) -> None:
    keys = (
        *("kvq_version", "commit", "date", "device", "command"),
        *("model", "model_digest", "text", "text_digest"),
    )
    origins: dict[str, Any] = {
        name: {"path": one, **{key: result.get(key) for key in keys}}
        for name, one, result in zip("ab", paths, results, strict=True)
    }
    facts = {key: value for key, value in found.items() if key != "rows"}
    write_rows(found["rows"], path, facts=origins | facts)
