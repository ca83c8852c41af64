"""An engine to simulate, from a model, a GPU and a KV format: what `kvq plan` plans."""

from kvq.capacity.fleet.replica import EngineSpec
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.lengths import Length
from kvq.capacity.plan.plan import CapacityPlan, Engine, Target, make_plan
from kvq.capacity.plan.roofline import Efficiency
from kvq.errors import ConfigError
from kvq.scheduler import SchedulerConfig
from kvq.sizing.pools import reserve_blocks


def make_engine(
    target: Target,
    gpu: Gpu,
    kv: str,
    *,
    engine: Engine,
    config: SchedulerConfig,
    efficiency: Efficiency | None = None,
) -> tuple[EngineSpec, CapacityPlan]:
    """One replica, of as many GPUs as the target is split over, and the plan of its memory.

    Raises:
        ConfigError: the model doesn't fit, or its parameters are not known.
    """
    if target.parameters is None:
        raise ConfigError(f"{target.name}: simulating needs the model's parameters, not only their bytes")
    context = config.max_context
    plan = make_plan(
        target, gpu, kv, [Length(context - 1, 1)], slot_tokens=context, engine=engine, efficiency=efficiency
    )
    assert plan.time is not None, "known where the parameters are"
    spec = EngineSpec(
        num_blocks=list(plan.num_blocks),
        block_size=engine.block_size,
        windows=list(plan.time.windows),
        config=config,
        time=plan.time,
        reserve_blocks=reserve_blocks(plan.num_blocks),
    )
    return spec, plan
