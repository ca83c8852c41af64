"""How fast a plan serves: its bytes and operations on the roofline."""

from collections.abc import Sequence
from statistics import fmean

from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.lengths import Length
from kvq.capacity.plan.memory import Split
from kvq.capacity.plan.parameters import Parameters
from kvq.capacity.plan.pools import bytes_of, sequence_blocks
from kvq.capacity.plan.roofline import (
    Efficiency,
    Machine,
    Serving,
    decode_step_s,
    expert_share,
    prefill_s,
    steady_state,
)
from kvq.geometry import ModelGeometry
from kvq.layout import KVLayout


def serving(
    parameters: Parameters,
    geometry: ModelGeometry,
    layout: KVLayout,
    gpu: Gpu,
    lengths: Sequence[Length],
    *,
    users: int,
    weight_bytes: int,
    step_tokens: int,
    split: Split,
    efficiency: Efficiency,
) -> Serving:
    """What `users` at once see, on average over the lengths.

    `layout` and `weight_bytes` are the fullest GPU's. Arithmetic counts in 16 bits, whatever the weights
    have. Stages of a pipeline take turns: each sees its share of the users.
    """
    machine = Machine(bandwidth=gpu.bandwidth, flops=1e12 * gpu.tflops["fp16"], efficiency=efficiency)
    batch = -(-users // split.pipeline)
    active = parameters.active / split.gpus
    held = fmean(
        [
            bytes_of(layout, sequence_blocks(layout, x.prompt, x.output // 2, step_tokens=step_tokens))
            for x in lengths
        ]
    )
    step = split.pipeline * decode_step_s(
        machine,
        weight_bytes=weight_bytes * _read_share(parameters, batch),
        kv_bytes=batch * held,
        batch=batch,
        parameters=active,
    )
    prompt = fmean(
        [
            prefill_s(
                machine,
                weight_bytes=weight_bytes * _read_share(parameters, x.prompt),
                parameters=active,
                tokens=x.prompt,
                attention_flops=_attention_flops(geometry, x.prompt) / split.gpus,
            )
            for x in lengths
        ]
    )
    output = max(1.0, fmean([float(x.output) for x in lengths]))
    return steady_state(users=users, step_s=step, prefill_s=split.pipeline * prompt, output_tokens=output)


def _read_share(parameters: Parameters, tokens: int) -> float:
    """Of the weights, what a step of so many tokens reads: looked-up rows and idle experts are left out."""
    read: float = parameters.total
    if parameters.head:
        read -= parameters.embedding
    if parameters.experts:
        chosen = parameters.active_experts / parameters.experts
        read -= parameters.experts * (1 - expert_share(1, chosen, tokens))
    return read / parameters.total


def _attention_flops(geometry: ModelGeometry, tokens: int) -> float:
    """Scores and their sums of V over a prompt, half of the square, or what its windows leave of it."""
    total = 0.0
    for layer in geometry.layers:
        seen = tokens / 2 if layer.window is None else min(tokens / 2, float(layer.window))
        total += 2 * geometry.q_heads * (layer.k_head_dim + layer.v_head_dim) * tokens * seen
    return total
