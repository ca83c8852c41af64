"""Tasks for lm_eval from local files, and what kvq itself scores on them, without a server."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import kvq
from kvq.evals.text import default_text

_DOCS = 24
_WORDS = 24  # of a context; a third as many follow
_HEAD = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{context}}",
    "num_fewshot": 0,
    "metadata": {"version": 1},
}
TASKS: dict[str, dict[str, Any]] = {
    "kvq_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "kvq_continue": {
        "output_type": "loglikelihood",
        "doc_to_target": " {{target}}",  # of this kind lm_eval puts no space before it
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "kvq_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "kvq_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{generated}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


class Scorer:
    """kvq's own log-probabilities, from the model's forward pass."""

    def __init__(self, model: str, kv: str) -> None:
        self.model = kvq.load(model, kv=kv, device="cpu")
        self.encode = lambda text: self.model.tokenizer(text, add_special_tokens=False)["input_ids"]

    def score(self, tokens: Sequence[int], start: int) -> tuple[float, bool]:
        """Log-probability of the tokens from `start` on, and whether each is the likeliest."""
        logits = torch.as_tensor(self.model.logits(list(tokens)))[start - 1 : -1].float()
        wanted = torch.tensor(tokens[start:])
        found = torch.log_softmax(logits, -1).gather(1, wanted[:, None])[:, 0]
        return float(found.double().sum()), bool((logits.argmax(-1) == wanted).all())

    def follow(self, context: str, text: str) -> tuple[float, bool]:
        """Score a text after a context and a space, cut into tokens as lm_eval cuts them."""
        return self.score(self.encode(f"{context} {text}"), len(self.encode(context)))


def make_docs(model: str, kv: str) -> list[dict[str, Any]]:
    """Contexts with what follows them, three other texts, and what kvq generates."""
    words = default_text().text.split()
    step = _WORDS + _WORDS // 3
    pieces = [words[i * step : (i + 1) * step] for i in range(_DOCS)]
    ends = [" ".join(piece[_WORDS:]) for piece in pieces]
    docs: list[dict[str, Any]] = []
    for i, piece in enumerate(pieces):
        choices = [ends[(i + j) % _DOCS] for j in range(4)]
        answer = i % 4
        choices[0], choices[answer] = choices[answer], choices[0]
        docs.append(
            {
                "context": " ".join(piece[:_WORDS]),
                "target": piece[_WORDS],
                "choices": choices,
                "answer": answer,
            }
        )
    params = kvq.SamplingParams(max_tokens=16, stop=["\n\n"])
    with kvq.LLM(model, kv, num_blocks=256, device="cpu") as llm:
        for doc, out in zip(docs, llm.generate([doc["context"] for doc in docs], params), strict=True):
            doc["generated"] = out.outputs[0].text
    return docs


def own_scores(scorer: Scorer, docs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the scores that lm_eval should find, by task and metric."""
    right = num_bytes = 0
    follows: list[tuple[float, bool]] = []
    rolling = 0.0
    prefix = scorer.model.tokenizer.eos_token_id
    for doc in docs:
        scores = [scorer.follow(doc["context"], choice)[0] for choice in doc["choices"]]
        right += max(range(4), key=scores.__getitem__) == doc["answer"]
        follows.append(scorer.follow(doc["context"], doc["target"]))
        rolling += scorer.score([prefix, *scorer.encode(doc["context"])], 1)[0]
        num_bytes += len(doc["context"].encode())
    return {
        "kvq_choice/acc": right / len(docs),
        "kvq_continue/perplexity": math.exp(-sum(score for score, _ in follows) / len(docs)),
        "kvq_continue/acc": sum(greedy for _, greedy in follows) / len(docs),
        "kvq_rolling/byte_perplexity": math.exp(-rolling / num_bytes),
        "kvq_generate/exact_match": 1.0,
    }


def write_tasks(folder: Path, docs: list[dict[str, Any]]) -> None:
    """The documents, and a file for each task; JSON is YAML too."""
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf8")
    for name, task in TASKS.items():
        full = _HEAD | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}} | task
        (folder / f"{name}.yaml").write_text(json.dumps(full), encoding="utf8")
