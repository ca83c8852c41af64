"""Your own engine over kvq's blocks: continuous batching, shared prefixes, transformers' model code.

python examples/own_engine.py [FORMAT]
"""

import sys
from collections import deque
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

import kvq
from kvq.blockmgr import BlockManager, Sequence
from kvq.cache import KVCache
from kvq.kernels import AttentionOptions, SequenceBatch

CPU = torch.device("cpu")


@dataclass
class Request:
    ids: list[int]  # of the prompt, then of what was chosen
    end: int  # ids at most
    sequence: Sequence | None = None
    reused: int = 0  # tokens that somebody else had computed


class Engine:
    def __init__(self, known: kvq.Model, *, max_batch: int = 4, max_tokens: int = 4096) -> None:
        self.layout, self.max_batch = known.layout, max_batch
        blocks = self.layout.blocks_for(1, max_tokens)  # of every pool, for all requests together
        self.cache = KVCache(self.layout, num_blocks=blocks, device=CPU)
        self.manager = BlockManager(
            num_blocks=blocks, block_size=self.layout.block_size, **self.layout.holding
        )
        AttentionInterface.register("own_engine", self.attention)
        self.model = AutoModelForCausalLM.from_pretrained(
            known.prepared.folder, dtype=torch.float32, attn_implementation="own_engine"
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def attention(self, module, q, k, v, mask, scaling, **_):
        """Replace the attention of the model's layers; q, k, v: [1, heads, all new tokens, dim]."""
        layer, (q, k, v) = module.layer_idx, (x[0].transpose(0, 1) for x in (q, k, v))
        batch = self.cache.batch_of(layer, self.batches)
        options = AttentionOptions(scale=scaling, window=self.layout.geometry.layers[layer].window)
        self.cache.write(layer, k, v, batch.slots)
        return self.cache.attend(layer, q, batch, options)[0][None], None

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run the prompts of new requests and one token of all others; return the requests that are done."""
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting.popleft()
            request.sequence = self.manager.start(self.manager.prompt(request.ids))
            request.reused = request.sequence.length
            self.running.append(request)
        sequences = [request.sequence for request in self.running]
        new = [request.ids[request.sequence.length :] for request in self.running]
        counts = [len(ids) for ids in new]
        slots = self.manager.append(list(zip(sequences, counts, strict=True)))  # or OutOfBlocks: free one
        self.cache.carry_out(self.manager.take_orders())
        ends = [sequence.length for sequence in sequences]
        self.batches = [
            SequenceBatch.of([sequence.tables[group] for sequence in sequences], own, counts, ends, CPU)
            for group, own in enumerate(slots)
        ]
        positions = chain.from_iterable(range(end - n, end) for end, n in zip(ends, counts, strict=True))
        ids, positions = torch.tensor([[*chain.from_iterable(new)], [*positions]]).split(1)
        last = torch.tensor(counts).cumsum(0) - 1
        made = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=last)
        chosen = made.logits[0].argmax(-1).tolist()
        for request, token in zip(self.running, chosen, strict=True):
            request.ids.append(token)
            self.manager.commit(request.sequence, [token])  # other requests can now reuse its blocks
        done = [request for request in self.running if len(request.ids) >= request.end]
        for request in done:
            self.manager.free(request.sequence)
        self.running = [request for request in self.running if len(request.ids) < request.end]
        return done


def main(kv: str) -> None:
    known = kvq.load("tiny", kv)
    engine = Engine(known, max_batch=2)
    text = (
        "The cache keeps keys and values of every token that was read, so that none is computed twice. " * 2
    )
    for question in ("Once upon a time", text + "And", text + "Then", text + "But"):
        ids = known.tokenizer(question)["input_ids"]
        engine.waiting.append(Request(ids, end=len(ids) + 16))
    while engine.waiting or engine.running:
        for request in engine.step():
            print(f"{request.reused} tokens reused: ...{known.tokenizer.decode(request.ids[-24:])!r}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["int4"]))
