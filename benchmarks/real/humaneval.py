"""HumanEval: functions that models write greedily, run against the problems' own tests."""

import gzip
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvq
from benchmarks.real.asking import answers, asked
from benchmarks.real.bench import Bench
from benchmarks.real.closeness import answers_agreement, in_format, sizes
from benchmarks.real.records import Settings
from benchmarks.real.sandbox import run
from kvq.errors import ConfigError
from kvq.evals.report.bootstrap import share_interval
from kvq.evals.text import text_ids
from kvq.evals.watch import Progress

NEW_TOKENS = 512
_QUESTION = "Complete this Python function. Answer with its code only."
_BEGUN = "   "  # of every body: a space is left for the first word, as tokenizers cut indentation
_AT_ONCE = 16  # sequences
_STOPS = (
    "\ndef ",
    "\nclass ",
    "\nif ",
    "\nprint(",
    "\nassert ",
    "\nimport ",
    "\nfrom ",
    "\n#",
    "\n@",
    "\n```",
)
_NEXT = re.compile(r"\n(?=[^\s)\]}])")  # where something stands that is not indented


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One of HumanEval's."""

    name: str
    prompt: str  # imports, signature and docstring
    solution: str  # a body
    test: str  # a function `check`
    entry: str  # the function's name

    def program(self, body: str) -> str:
        """Source that runs through if the function is right."""
        return f"{self.prompt}{body}\n\n{self.test}\n\ncheck({self.entry})\n"

    def asked(self, tokenizer: Any) -> list[int]:
        """The token ids after which a model writes the body."""
        return asked(tokenizer, _QUESTION, f"```python\n{self.prompt}{_BEGUN}")


def read_problems(path: Path, count: int) -> list[Problem]:
    """The first problems of HumanEval's file.

    Raises:
        ConfigError: it is not there, or another one.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = [json.loads(line) for line in file if line.strip()]
        return [
            Problem(
                name=one["task_id"],
                prompt=one["prompt"],
                solution=one["canonical_solution"],
                test=one["test"],
                entry=one["entry_point"],
            )
            for one in found[:count]
        ]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} can't be read as HumanEval's problems: {error}; run make real") from error


def body_of(text: str) -> str:
    """The function's body, of what a model wrote: all before the first line that is not indented."""
    return _BEGUN + _NEXT.split(text, maxsplit=1)[0]


def measure(bench: Bench, kv: str, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Let a model write every function over a format, and agree with the solutions that are given."""
    problems = read_problems(bench.lab.problems, settings["problems"])
    tokenizer, model = bench.prepared.tokenizer, in_format(bench.model, kv)
    prompts = [problem.asked(tokenizer) for problem in problems]
    total = 2 * len(problems)  # each is written, and its solution read
    params = kvq.SamplingParams(max_tokens=settings["new_tokens"], stop=_STOPS)
    outputs = answers(
        model, prompts, params, at_once=_AT_ONCE, progress=lambda done, _: progress(done, total)
    )
    bodies = [body_of(output.outputs[0].text) for output in outputs]
    passed = judge(problems, bodies)
    solutions = [text_ids(tokenizer, problem.solution.removeprefix(_BEGUN)) for problem in problems]
    texts = list(zip(prompts, solutions, strict=True))
    half = len(problems)
    agreement = answers_agreement(model, bench.baseline, texts, lambda done, _: progress(half + done, total))
    return {
        **sizes(model),
        **shares(passed),
        "new_tokens_mean": sum(len(output.outputs[0].token_ids) for output in outputs) / len(outputs),
        **agreement,
    }


def judge(problems: list[Problem], bodies: list[str]) -> list[bool]:
    """Run every program; two at a time."""
    programs = [problem.program(body) for problem, body in zip(problems, bodies, strict=True)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [outcome.passed for outcome in pool.map(run, programs)]


def shares(passed: list[bool]) -> dict[str, Any]:
    """Summarize outcomes: their number, their share with its interval, and each of them."""
    return {
        "trials": len(passed),
        "hits": sum(passed),
        "share": sum(passed) / len(passed),
        "outcomes": "".join("01"[one] for one in passed),
        "intervals": {"share": share_interval(sum(passed), len(passed))},
    }
