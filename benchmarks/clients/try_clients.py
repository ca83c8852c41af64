"""Other people's clients against `kvq serve`, each in an environment of its own.

    python benchmarks/clients/try_clients.py [--parts openai-1,...] [--environments FOLDER] [--out FOLDER]

openai-1, openai-2, openai: the official client's majors. anthropic-0, anthropic: likewise. langchain, litellm
and ai_sdk (Vercel's, for node): chats, embeddings and more; open_webui: its calls, replayed. lm_eval: four
tasks from local files as `local-completions`, whose scores have to be those that kvq finds without a server,
with tokens and with texts as prompts. Environments are made with pip or npm if they are not there, and kept
(lm_eval's has 1 GB). The server has the embedded model. Writes FOLDER/clients-cpu.json; ends with 1 if
something fails.
"""

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval_tasks import TASKS, Scorer, make_docs, own_scores, write_tasks

from kvq.bench.serve.process import ServerProcess
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.models.describe.resolve import resolve_model

HERE = Path(__file__).resolve().parent
KV = "fp32"
OPTIONS = (
    *("--model", "tiny", "--kv", KV, "--num-blocks", "256", "--log-level", "warning"),
    *("--pooling", "mean", "--tool-call-parser", "hermes"),
)
PACKAGES = {
    "openai-1": ["openai<2"],
    "openai-2": ["openai<3"],
    "openai": ["openai"],
    "anthropic-0": ["anthropic<1"],
    "anthropic": ["anthropic"],
    "langchain": ["langchain-openai"],
    "litellm": ["litellm"],
    "open_webui": ["httpx"],
    "lm_eval": ["lm-eval[api]==0.4.13", "transformers==5.23.0"],  # no torch, which it needs for no API
}
NODE_PACKAGES = {"ai_sdk": ["ai", "@ai-sdk/openai-compatible"]}
_CLOSE = 1e-3  # relative, of perplexities: the engine adds up in another order
Rows = list[dict[str, Any]]


def environment(name: str, folder: Path) -> Path:
    """The Python of an environment with a client's packages, or node's folder; made if it is not there."""
    done = folder / name / "complete"
    if name in NODE_PACKAGES:
        if not done.exists():
            words = ["npm", "install", "--silent", "--prefix", folder / name, *NODE_PACKAGES[name]]
            subprocess.run(words, check=True)
            done.touch()
        return folder / name
    python = folder / name / "bin" / "python"
    if not done.exists():
        print(f"installing {' '.join(PACKAGES[name])}", file=sys.stderr)
        venv.create(folder / name, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True)
        done.touch()
    return python


def run(python: Path | str, *words: str, cwd: Path | None = None, **variables: str) -> str:
    """Run a command without a proxy, a key or a network; returns its output.

    Raises:
        RuntimeError: it ended otherwise than with 0.
    """
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "NO_PROXY": "127.0.0.1"} | variables
    env.pop("PYTHONPATH", None)
    command = [str(python), *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900, cwd=cwd)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-2000:])
    return ended.stdout


def calls(script: str) -> Callable[[Path, str], Rows]:
    """A script of this folder, whose last line is what it ran with."""

    def part(python: Path, url: str) -> Rows:
        if script.endswith(".mjs"):
            told = run("node", str(HERE / script), url, "tiny", cwd=python)
        else:
            told = run(python, str(HERE / script), url, "tiny")
        client = told.splitlines()[-1]
        return [{"client": client, "what": "calls", "found": "as they should", "holds": True}]

    return part


def lm_eval(python: Path, url: str) -> Rows:
    """All tasks, twice."""
    rows = []
    version = run(python, "-c", "import lm_eval; print(lm_eval.__version__)").strip()
    docs = make_docs("tiny", KV)
    own = own_scores(Scorer("tiny", KV), docs)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, docs)
        for tokens in ("True", "False"):
            found = _evaluate(python, url, folder, tokens)
            for what, wanted in own.items():
                rows.append(
                    {
                        "client": f"lm_eval {version}",
                        "what": f"{what}, prompts as {'tokens' if tokens == 'True' else 'text'}",
                        "found": found[what],
                        "kvq": wanted,
                        "holds": math.isclose(found[what], wanted, rel_tol=_CLOSE),
                    }
                )
    return rows


def _evaluate(python: Path, url: str, folder: Path, tokens: str) -> dict[str, float]:
    out = folder / f"out-{tokens}"
    arguments = {
        "base_url": f"{url}/v1/completions",
        "model": "tiny",
        "tokenizer": str(resolve_model("tiny").folder),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": tokens,
        "num_concurrent": "4",
        "max_length": "4096",
        "max_retries": "1",
    }
    run(
        python, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", ",".join(TASKS),
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--include_path", str(folder), "--output_path", str(out), "--batch_size", "1",
        HF_HOME=str(folder / "hf"),
    )  # fmt: skip
    [path] = out.rglob("results_*.json")
    results = json.loads(path.read_text(encoding="utf8"))["results"]
    return {
        f"{task}/{name.partition(',')[0]}": value
        for task, metrics in results.items()
        for name, value in metrics.items()
        if isinstance(value, float)
    }


PARTS: dict[str, Callable[[Path, str], Rows]] = {
    **dict.fromkeys(("openai-1", "openai-2", "openai"), calls("openai_calls.py")),
    **dict.fromkeys(("anthropic-0", "anthropic"), calls("anthropic_calls.py")),
    "langchain": calls("langchain_calls.py"),
    "litellm": calls("litellm_calls.py"),
    "open_webui": calls("open_webui_calls.py"),
    "ai_sdk": calls("ai_sdk_calls.mjs"),
    "lm_eval": lm_eval,
}


async def try_all(names: list[str], folder: Path) -> Rows:
    """The clients, one after the other, against one server."""
    pythons = {name: environment(name, folder) for name in names}
    rows: Rows = []
    async with ServerProcess(OPTIONS) as server:
        url = f"http://{server.target.host}:{server.target.port}"
        for name in names:
            try:
                rows += await asyncio.to_thread(PARTS[name], pythons[name], url)
            except RuntimeError as error:
                rows.append({"client": name, "what": "calls", "found": str(error), "holds": False})
    return rows


def main() -> None:
    """Try them, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "kvq-clients")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    given = parser.parse_args()
    source_commit()
    given.environments.mkdir(parents=True, exist_ok=True)
    rows = asyncio.run(try_all(given.parts.split(","), given.environments))
    write_json(given.out / "clients-cpu.json", envelope(sys.argv, torch.device("cpu"), rows))
    for row in rows:
        print(f"{'holds' if row['holds'] else 'FAILS':<8}{row['client']}: {row['what']}: {row['found']}")
    sys.exit(not all(row["holds"] for row in rows))


if __name__ == "__main__":
    main()
