"""Draw the figures of the documentation: from the committed results, and who takes which road."""

import json
from pathlib import Path

from kvq.bench.figures import roofline_figure
from kvq.evals.report.figure import write_figure
from kvq.evals.report.plot import perplexity_figure
from tools.roads_figure import roads_svg

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CASE, SHOWN = "decode 1 x 32768, GQA 4", ("bf16", "fp8", "int8", "int4")


def main() -> None:
    """Write docs/kv-formats.svg, docs/attention-cpu.svg and docs/roads.svg."""
    write_figure(ROOT / "docs" / "kv-formats.svg", perplexity_figure, _read("tiny-default-cpu.json"))
    result = _read("kernels-cpu.json")
    rows = [row for row in result["rows"] if row.get("case") == CASE]
    rows = [row for row in rows if row["name"] != "kvq" or row["kv"] in SHOWN]
    bandwidth = rows[0]["read_gb_per_s"]
    drawn = {**result, "rows": rows, "read_gb_per_s": bandwidth}
    write_figure(ROOT / "docs" / "attention-cpu.svg", roofline_figure, drawn)
    (ROOT / "docs" / "roads.svg").write_text(roads_svg(), encoding="utf-8")


def _read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


if __name__ == "__main__":
    main()
