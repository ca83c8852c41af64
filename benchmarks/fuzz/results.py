"""A door: `kvq compare`, of results that are nearly kvq's."""

import json
import random
import tempfile
import traceback
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from benchmarks.fuzz.mutate import mutated, mutated_bytes
from kvq.commands.quality.compare import command
from kvq.errors import KVQError

_CONTROLS = set(map(chr, (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F))))


def case(odds: random.Random) -> str | None:
    """A result against one that is changed; a finding, if what came of it is no error of kvq's."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("a.json", "b.json")]
        whole = json.dumps(_result()).encode()
        changed = json.dumps(mutated(odds, _result())).encode()
        if odds.random() < 0.2:
            changed = mutated_bytes(odds, whole)
        contents = [whole, changed]
        odds.shuffle(contents)
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        done = CliRunner().invoke(command, [*map(str, paths), "--json", str(Path(folder, "c.json"))])
    if _CONTROLS & set(done.output):
        return f"controls are shown of {changed!r}"
    if done.exception is None or isinstance(done.exception, KVQError):
        return None
    told = "".join(traceback.format_exception(done.exception))
    return f"{told[-700:]}\n{changed!r}"  # findings are cut at their ends


def _result() -> dict[str, Any]:
    def row(kv: str, kl: float) -> dict[str, Any]:
        return {
            "kv": kv, "bits_per_element": 8.0, "kv_bytes_per_token": 10.0, "compression": 2.0, "tokens": 100,
            "perplexity": 5.0, "perplexity_change": 0.01, "kl_mean": kl, "kl_p999": 0.1, "seconds": 1.0,
            "top1_agreement": 0.9, "intervals": {"kl_mean": [0.0, 0.2], "perplexity": None},
            "attention_window": None,
        }  # fmt: skip

    needles = [{"kv": "int8", "length": n, "depth": 0.5, "retrieved": 0.5, "seconds": 1.0} for n in (64, 128)]
    return {
        "kvq_version": "1", "commit": "c", "date": "d", "device": "cpu", "versions": {"torch": "2"},
        "command": "kvq eval", "model": "m", "model_digest": "1" * 64, "text": "t", "text_digest": "2" * 64,
        "context": 64, "seed": 1, "resamples": 10, "held_out": "h", "held_out_digest": "3" * 64,
        "rows": [row("fp32", 0.0), row("int8", 0.1)],
        "tasks": [{"key": "rows"}, {"key": "needle"}, {"key": "lm_eval"}],
        "needle_summary": [{"kv": "int8", "retrieved": 0.5, "retrieved_low": 0.1, "retrieved_high": 0.6}],
        "needle": needles, "needle_plan": {"lengths": [64, 128]},
        "lm_eval": [{"kv": "int8", "task": "a", "metric": "acc", "filter": "none", "value": 0.5,
                     "stderr": 0.1}],
    }  # fmt: skip
