"""`kvq.plan`: a plan in one call."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from kvq.arguments import checked
from kvq.capacity.plan.gpus import Gpu, find_gpu
from kvq.capacity.plan.lengths import Demand, Length, fixed
from kvq.capacity.plan.plan import CapacityPlan, Engine, make_plan
from kvq.capacity.plan.target import make_target
from kvq.errors import ConfigError
from kvq.sizing.held import AUTO
from kvq.sizing.memory import Split


class PlanKeywords(TypedDict, total=False):
    """What `plan` takes of the model's weights, of the engine and of what requests share."""

    weights: str
    weight_bytes: int | None
    split: Split | None
    engine: Engine | None
    prefix_share: float


@checked
def plan(
    model: str | Path,
    *,
    gpu: str | Gpu,
    kv: str = "int4",
    context: int | None = None,
    output: int | None = None,
    lengths: Sequence[Length] | None = None,
    **options: Unpack[PlanKeywords],
) -> CapacityPlan:
    """How many requests of `context` tokens, or of these `lengths`, fit on a GPU.

    `model`: a name of `kvq models`, or a folder with a config.json. `output`: of the context, an eighth
    unless said. `weights`: the format of the linear layers, by default what the config says of
    the checkpoint's; `weight_bytes` replaces the count. `split`: over how many GPUs it is spread; `engine`:
    settings that take memory; `prefix_share`: of the prompts, what all requests have in common.

    Raises:
        ConfigError: something unknown, no lengths, or the model doesn't fit, with by how much.
    """
    target = make_target(
        model,
        weights=options.get("weights", AUTO),
        weight_bytes=options.get("weight_bytes"),
        split=options.get("split"),
    )
    if (context is None) == (lengths is None):
        raise ConfigError("how long requests are decides how many fit: give either context or lengths")
    drawn = lengths or fixed(context or 0, output or (context or 0) // 8)
    demand = Demand(lengths=drawn, prefix_share=options.get("prefix_share", 0.0))
    found = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    return make_plan(target, found, kv, demand, engine=options.get("engine"))
