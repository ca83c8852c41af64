"""Hidden states behind a model's last norm: what its head makes logits of, a piece of rows at a time.

Logits of 16,000 tokens over a vocabulary of 151,936 take 9.7 GB, what they are made of 57 MB. So hidden
states are what is kept of unquantized KV, in fp32, and logits of both sides are made where they are compared.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvq.errors import ModelError
from kvq.models import Model, Session

BASELINE = "fp32"  # KV that others are measured against
_STEP = 1024  # tokens that are prefilled at once
_LOGITS_BYTES = 64 << 20  # of one piece
_NAME = "hidden"


@torch.inference_mode()
def hidden_states(session: Session, ids: Sequence[int]) -> Tensor:
    """Run a sequence of its own through a session: fp32 [tokens, hidden_size], after each of its tokens.

    Raises:
        RequestError: K or V that are not finite.
        ModelError: logits are more than a head makes of these.
    """
    model: Any = session.weights.model
    head = model.get_output_embeddings()
    sequence = session.new_sequence()
    parts = []
    for at in range(0, len(ids), _STEP):
        piece = list(ids[at : at + _STEP])
        with _kept(model.base_model) as kept:
            logits = session.forward([(sequence, piece)])[0].trusted_logits()
        hidden = kept[-1][: len(piece)].float()
        if not torch.allclose(head(hidden[-1:].to(kept[-1].dtype)).float(), logits, rtol=1e-4, atol=1e-4):
            raise ModelError("this model does more to its logits than its head does; it can't be measured so")
        parts.append(hidden)
    session.free(sequence)
    return torch.cat(parts)


@torch.inference_mode()
def log_probs(model: Model, hidden: Tensor) -> Tensor:
    """Return log-probabilities of the head for hidden states: fp32 [rows, vocab]."""
    head: Any = model.weights.model.get_output_embeddings()
    return torch.log_softmax(head(hidden.to(model.prepared.dtype)).float(), dim=-1)


def pieces(model: Model, rows: int) -> Iterator[slice]:
    """Rows whose logits fit into memory, one piece after the other."""
    size = max(1, _LOGITS_BYTES // (4 * model.geometry.vocab_size))
    return (slice(at, min(rows, at + size)) for at in range(0, rows, size))


@dataclass(frozen=True, slots=True)
class Baseline:  # D49: hidden states are kept, the head runs again
    """Hidden states of a model over unquantized KV, computed once and kept in a folder."""

    model: Model
    folder: Path

    def states(self, ids: Sequence[int]) -> Tensor:
        """fp32 [tokens, hidden_size]; a file is named after the model's digest and the tokens."""
        path = self.folder / f"{self._digest(ids)}.safetensors"
        try:
            found: Tensor = load_file(path)[_NAME]
        except (FileNotFoundError, SafetensorError, KeyError):
            found = hidden_states(self.model.with_kv(BASELINE).session(max_tokens=len(ids)), ids)
            self.folder.mkdir(parents=True, exist_ok=True)
            aside = path.with_suffix(".partial")
            save_file({_NAME: found}, aside)
            aside.rename(path)
        return found

    def _digest(self, ids: Sequence[int]) -> str:
        told = f"{self.model.weights.digest} {self.model.prepared.dtype} {','.join(map(str, ids))}"
        return hashlib.sha256(told.encode()).hexdigest()[:32]


@contextmanager
def _kept(inner: Any) -> Iterator[list[Tensor]]:
    """Keep what a causal model's body returns."""
    kept: list[Tensor] = []
    hook = inner.register_forward_hook(lambda module, given, output: kept.append(output.last_hidden_state[0]))
    try:
        yield kept
    finally:
        hook.remove()
