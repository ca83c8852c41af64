"""`kvq compare`: two results of `kvq perplexity` or `kvq eval` side by side."""

import math
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.param_types import TO_READ, TO_WRITE
from kvq.commands.shared.results import write_rows
from kvq.commands.shared.tables import console, text_table
from kvq.commands.shared.terminal import warn
from kvq.printable import one_line

if TYPE_CHECKING:
    from kvq.evals.report.compare import Comparison, Difference

_PERCENT = ("perplexity_change", "top1_agreement", "top5_agreement", "identical")


@click.command(name="compare")
@click.argument("a", type=TO_READ)
@click.argument("b", type=TO_READ)
@click.option("--json", "json_path", type=TO_WRITE, help="Write the differences as JSON.")
def command(a: str, b: str, json_path: str | None) -> None:
    """Compare A and B, JSON files of `kvq perplexity` or of `kvq eval`, format by format.

    Differences are B's figure minus A's. Reasons why figures can't be compared are printed first.
    """
    from kvq import fileio
    from kvq.evals.report.compare import compare
    from kvq.evals.report.result_file import read_result

    results = read_result(a), read_result(b)
    if json_path is not None:
        fileio.check_writable(json_path)
    found = compare(*results)
    _print((a, b), results, found)
    _write(json_path, (a, b), results, found)


def _print(paths: tuple[str, str], results: tuple[Any, Any], found: "Comparison") -> None:
    for warning in found.warnings:
        warn(warning)
    out = console()
    for name, path, result in zip("AB", paths, results, strict=True):
        out.print(
            one_line(
                f"{name}  {path}: {result['model']}, {result['text']}, windows of {result['context']}, "
                f"{result['date']}, commit {result.get('commit')}"
            )
        )
    for section in dict.fromkeys(one.section for one in found.differences):
        shown = [one for one in found.differences if one.section == section]
        figures = list(dict.fromkeys(one.figure for one in shown))
        rows = list(dict.fromkeys((one.kv, one.where) for one in shown))
        cells = {(one.kv, one.where, one.figure): _cell(one) for one in shown}
        out.print(f"\n{'per format' if section == 'rows' else section}: A, B (B - A)", style="bold")
        table = [
            [", ".join(filter(None, row)), *(cells.get((*row, figure), "-") for figure in figures)]
            for row in rows
        ]
        out.print(text_table(("kv", *figures), table))
    if any(not _overlap(one.a_interval, one.b_interval) for one in found.differences):
        out.print("!  the 95% intervals don't overlap")
    for name, labels in (("A", found.only_in_a), ("B", found.only_in_b)):
        if labels:
            out.print(f"\nonly in {name}: {one_line('; '.join(labels))}")


def _cell(one: "Difference") -> str:
    form = ".3%" if one.figure in _PERCENT else ",.5g"
    change = 0.0 if math.isclose(one.a, one.b, rel_tol=1e-9) else one.difference
    apart = "" if _overlap(one.a_interval, one.b_interval) else " !"
    return f"{one.a:{form}}, {one.b:{form}} ({change:+{form}}){apart}"


def _overlap(a: Any, b: Any) -> bool:
    return a is None or b is None or (a[0] <= b[1] and b[0] <= a[1])


def _write(path: str | None, paths: tuple[str, str], results: tuple[Any, Any], found: "Comparison") -> None:
    keys = (
        *("kvq_version", "commit", "date", "device", "command"),
        *("model", "model_digest", "text", "text_digest"),
    )
    origins: dict[str, Any] = {
        name: {"path": one, **{key: result.get(key) for key in keys}}
        for name, one, result in zip("ab", paths, results, strict=True)
    }
    facts = {"warnings": found.warnings, "only_in_a": found.only_in_a, "only_in_b": found.only_in_b}
    write_rows(found.differences, path, facts=origins | facts)
