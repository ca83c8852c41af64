"""Watermarks: how many marked texts are found, how many others are called marked, what they cost.

    python benchmarks/watermark.py --text TEST.txt --json OUT.json

Each row marks texts of one scheme at one temperature, with several keys, behind prompts of a plain text.
They are tested by their tokens, and by the tokens that their text is cut into again. Texts without a mark
are the same engine's with the same seeds, and windows of the plain text, each tested with many other keys.
The cost is the mean loss of the drawn tokens under the model as it is, paired by prompt.
"""

import sys
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch

import kvq
from kvq.engine.requests.outputs import RequestOutput
from kvq.evals import read_text
from kvq.evals.report.bootstrap import Bootstrap, share_interval
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.fileio import PRIVATE, write_bytes
from kvq.models.describe.resolve import resolve_model
from kvq.models.loading.tokenizer import load_tokenizer
from kvq.watermark import Key, Scheme, detect, parse_scheme, read_key
from kvq.watermark.schemes import spelled

PLANS = (
    ("green", 1.0),
    ("tournament", 1.0),
    ("green,delta=1", 1.0),
    ("green", 0.7),
    ("tournament", 0.7),
)
PROMPT = 32  # tokens
ALARMS = 1e-4
LOOSE = 1e-2  # where false alarms are many enough to be counted well


def key_of(number: int, folder: Path) -> Path:
    """The file of a key that is the same in every run."""
    path = folder / f"key-{number}"
    write_bytes(path, sha256(f"watermark {number}".encode()).hexdigest().encode(), permissions=PRIVATE)
    return path


def drawn(
    model: str, prompts: Sequence[list[int]], tokens: int, temperature: float, **options: Any
) -> list[RequestOutput]:
    """One text behind each prompt, with the prompt's number as its seed."""
    params = [
        kvq.SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=seed, logprobs=0)
        for seed in range(len(prompts))
    ]
    with kvq.LLM(model, kv="fp32", kv_memory="512MiB", max_num_seqs=64, device="cpu", **options) as llm:
        return llm.generate(list(prompts), params)


def losses(outputs: Sequence[RequestOutput]) -> np.ndarray:
    """Mean loss of each text's tokens under the model as it is, nats."""
    each = [output.outputs[0] for output in outputs]
    return np.array([-one.cumulative_logprob / len(one.token_ids) for one in each])


def counted(ps: Sequence[float], bar: float = ALARMS) -> tuple[int, Any]:
    """Count how many are below the bar; returns the share's interval, too."""
    hits = sum(p < bar for p in ps)
    return hits, share_interval(hits, len(ps))


def row_of(
    scheme: Scheme,
    temperature: float,
    marked: Sequence[tuple[Key, RequestOutput]],
    unmarked: Sequence[RequestOutput],
    tokenizer: Any,
) -> dict[str, Any]:
    """Return the detection of marked texts, and their cost against unmarked ones."""
    texts = [output.outputs[0] for _, output in marked]
    again = [tokenizer.encode(one.text, add_special_tokens=False) for one in texts]
    found = [detect(one.token_ids, scheme, key) for one, (key, _) in zip(texts, marked, strict=True)]
    reread = [detect(ids, scheme, key).p for ids, (key, _) in zip(again, marked, strict=True)]
    with_mark, without = losses([output for _, output in marked]), losses(unmarked)
    detected, interval = counted([one.p for one in found])
    detected_again, interval_again = counted(reread)
    return {
        "scheme": spelled(scheme),
        "temperature": temperature,
        "texts": len(texts),
        "tokens": len(texts[0].token_ids),
        "detected": detected,
        "detected_interval": interval,
        "detected_in_text": detected_again,
        "detected_in_text_interval": interval_again,
        "same_tokens_in_text": sum(ids == one.token_ids for ids, one in zip(again, texts, strict=True)),
        "z_median": median(one.z for one in found),
        "counted_median": median(one.counted for one in found),
        "loss": float(with_mark.mean()),
        "loss_unmarked": float(without.mean()),
        "perplexity_change": float(np.exp(with_mark.mean() - without.mean()) - 1),
        "perplexity_change_interval": Bootstrap().interval(
            lambda a, b: np.exp(a - b) - 1, with_mark, without
        ),
    }


def alarms_of(scheme: Scheme, texts: Sequence[Sequence[int]], keys: Sequence[Key]) -> dict[str, Any]:
    """Count the tests of unmarked texts, each with every key, that call one marked."""
    by_key = [[detect(text, scheme, key).p for text in texts] for key in keys]
    ps = [p for of_key in by_key for p in of_key]
    (alarms, interval), (loose, loose_interval) = counted(ps), counted(ps, LOOSE)
    shares = [counted(of_key, LOOSE)[0] / len(of_key) for of_key in by_key]
    return {
        "false_alarms_of_worst_key": max(counted(of_key)[0] for of_key in by_key),
        "below_1_percent_of_keys": (min(shares), max(shares)),
        "tests": len(ps),
        "false_alarms": alarms,
        "false_alarms_interval": interval,
        "below_1_percent": loose,
        "below_1_percent_interval": loose_interval,
    }


@click.command()
@click.option("--model", default="tiny", show_default=True)
@click.option("--text", required=True, help="Plain text: prompts, and windows without a mark.")
@click.option("--texts", default=500, show_default=True, help="Of each row.")
@click.option("--tokens", default=200, show_default=True, help="Of a text.")
@click.option("--keys", default=5, show_default=True, help="That mark, each its part of the texts.")
@click.option("--other-keys", default=40, show_default=True, help="That unmarked texts are tested with.")
@click.option("--json", "json_path", required=True)
def main(model: str, text: str, texts: int, tokens: int, keys: int, other_keys: int, json_path: str) -> None:
    """Measure all schemes."""
    source_commit()
    plain = read_text(text)
    tokenizer = load_tokenizer(resolve_model(model).folder)
    ids = tokenizer.encode(plain.text, add_special_tokens=False)
    windows = [ids[at : at + tokens] for at in range(0, len(ids) - tokens + 1, tokens)]
    prompts = [window[:PROMPT] for window in windows[:: len(windows) // texts]][:texts]
    rows: list[dict[str, Any]] = []
    unmarked: dict[float, list[RequestOutput]] = {}
    alarms: dict[type[Scheme], dict[str, Any]] = {}  # delta changes none
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        others = [read_key(key_of(1000 + number, folder)) for number in range(other_keys)]
        for spelling, temperature in PLANS:
            scheme = parse_scheme(spelling)
            if temperature not in unmarked:
                unmarked[temperature] = drawn(model, prompts, tokens, temperature)
            marked: dict[int, tuple[Key, RequestOutput]] = {}
            for number in range(keys):
                options = {
                    "watermark": "always",
                    "watermark_key_file": key_of(number, folder),
                    "watermark_scheme": spelling,
                }
                outputs = drawn(model, prompts[number::keys], tokens, temperature, **options)
                key = read_key(options["watermark_key_file"])
                marked |= {
                    place: (key, output)
                    for place, output in zip(range(number, texts, keys), outputs, strict=True)
                }
            each = [marked[place] for place in range(texts)]
            rows.append(row_of(scheme, temperature, each, unmarked[temperature], tokenizer))
            if type(scheme) not in alarms:
                drawn_texts = [output.outputs[0].token_ids for output in unmarked[1.0]]
                alarms[type(scheme)] = alarms_of(scheme, [*windows, *drawn_texts], others)
            rows[-1] |= alarms[type(scheme)]
            click.echo(rows[-1])
            facts = {"model": model, "text": plain.name, "false_alarm_bar": ALARMS, "marking_keys": keys}
            facts |= {"other_keys": other_keys, "windows": len(windows)}
            write_json(json_path, envelope(sys.argv, torch.device("cpu"), rows, facts))


if __name__ == "__main__":
    main()
