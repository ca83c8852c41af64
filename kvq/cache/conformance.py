"""Conformance suite for cache backends: run `check_backend` on your backend.

The expected attention is computed in fp64 from the rows as the recipe's formats store them. A backend with
these formats therefore has to agree within `tolerance`, regardless of the formats' own error.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq.blockmgr.events import Copy, Fill, Order, Scrub
from kvq.blockmgr.pool import BlockId
from kvq.cache.backend import CacheBackend, CacheFactory
from kvq.cache.conformance_model import BLOCK_SIZE, LAYERS, WINDOW, Step, Trial
from kvq.errors import ConfigError, KVQError, UnsupportedKernel
from kvq.layout import BlockOrder

_POISON = 0xFF  # NaN as fp32, bf16, fp16, E4M3FN and as a scale
_SLIDING = 1  # the layer with a window; also the index of its layer group


def check_backend(
    make: CacheFactory,
    *,
    kv: str = "fp32",
    order: BlockOrder = BlockOrder.LAYER_MAJOR,
    device: torch.device | None = None,
    tolerance: float = 2e-3,
) -> None:
    """Run all checks on backends created by `make`.

    `kv`: formats, written as on the command line. `tolerance`: maximum allowed max|a - b| / max|b| for
    attention outputs and log-sum-exps.

    Raises:
        KVQError: some checks failed; the message lists each failed check with the reason.
    """
    trial = Trial(make=make, kv=kv, order=order, device=device or torch.device("cpu"), tolerance=tolerance)
    failures = []
    for name, check in CHECKS.items():
        try:
            check(trial)
        except KVQError as failure:
            failures.append(f"{name}: {failure}")
    if failures:
        raise KVQError(
            f"{len(failures)} of {len(CHECKS)} checks fail with {kv}, {order.value}: " + "; ".join(failures)
        )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise KVQError(otherwise)


def _require_blocks(cache: CacheBackend, blocks: list[list[Tensor]], what: str) -> None:
    for group, contents in enumerate(blocks):
        for i, content in enumerate(contents):
            same = torch.equal(cache.read_block(group, i), content)
            _require(same, f"{what}: group {group}, block {i} holds other bytes")


def _agree(trial: Trial, got: Tensor, expected: Tensor, what: str) -> None:
    _require(got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(expected.shape)}")
    if not expected.numel():
        return
    error = (got.double().cpu() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    _require(bool(error <= trial.tolerance), f"{what}: relative error {error:.1e} over {trial.tolerance:.1e}")


def _writes_and_attends(trial: Trial) -> None:
    """Check mixed prefills and decodes, empty and one-token sequences, odd head dimensions and windows."""
    cache = trial.cache()
    for step in trial.steps():
        for layer in LAYERS:
            _attend_and_compare(trial, cache, step, layer)


def _attend_and_compare(trial: Trial, cache: CacheBackend, step: Step, layer: int) -> None:
    bad = trial.write(cache, step, layer)
    _require(not bool(bad.any()) and len(bad) == step.tokens, "write: finite rows were flagged")
    for softcap, with_sinks in ((None, False), (20.0, False), (None, True)):
        options = trial.options(layer, softcap=softcap, with_sinks=with_sinks)
        try:
            out, lse = trial.attend(cache, step, layer, options)
        except UnsupportedKernel as refusal:
            _require(softcap is not None or with_sinks, f"plain attention is refused: {refusal}")
            continue
        expected_out, expected_lse = trial.expected(step, layer, options)
        where = f"layer {layer}, contexts {step.context_lens}, softcap {softcap}, sinks {with_sinks}"
        _agree(trial, out, expected_out, f"attention output, {where}")
        _agree(trial, lse, expected_lse, f"log-sum-exp, {where}")


def _ignores_what_free_blocks_hold(trial: Trial) -> None:
    """Check that results stay the same if every unwritten byte is part of a NaN."""
    clean, poisoned = trial.cache(), trial.cache()
    for group, count in enumerate(poisoned.num_blocks):
        for block in range(count):
            content = poisoned.read_block(group, block)
            poisoned.write_block(group, block, torch.full_like(content, _POISON))
    for step in trial.steps():
        for layer in LAYERS:
            results = []
            for cache in (clean, poisoned):
                trial.write(cache, step, layer)
                results.append(trial.attend(cache, step, layer, trial.options(layer)))
            for a, b in zip(*results, strict=True):
                _require(torch.equal(a, b), f"layer {layer}: unwritten slots reach the result")


def _flags_rows_that_are_not_finite(trial: Trial) -> None:
    cache, step = trial.cache(), trial.steps()[0]
    k, v = trial.rows(step, 0)
    k[0, 0, 1], v[2, 1, 0] = float("nan"), float("inf")
    store = cache.stores[0]
    bad = store.write(k, v, store.batch_of(trial.batches(step)).slots).tolist()
    _require(bad == [i in (0, 2) for i in range(step.tokens)], f"write: flags are {bad}")


def _blocks_do_not_overlap(trial: Trial) -> None:
    """Check that no two blocks share bytes, and that all blocks together have the reported size."""
    cache = trial.cache()
    blocks = trial.fill(cache)
    _require_blocks(cache, blocks, "blocks overlap")
    total = sum(content.numel() for contents in blocks for content in contents)
    _require(cache.nbytes == total, f"nbytes is {cache.nbytes}, its blocks have {total} bytes")


def _carries_out_orders_one_by_one(trial: Trial) -> None:
    """Check that copies, chains of copies, fills and scrubs give the same bytes as a plain simulation."""
    cache = trial.cache()
    blocks = trial.fill(cache)
    sealed, full = (_content(blocks[0][i]) for i in (4, 0))
    orders: list[Order] = [
        *(_copy(0, a, b) for a, b in ((0, 1), (1, 2), (3, 1), (1, 4))),
        *(_copy(1, a, b) for a, b in ((5, 6), (6, 5))),
        Scrub(group=0, block=BlockId(4)),
        _copy(0, 4, 5),
        *(_fill(0, block, content) for block, content in ((6, sealed), (5, full), (6, full))),
        _copy(0, 5, 0),
        _fill(1, 3, _content(blocks[1][2])),
        Scrub(group=1, block=BlockId(6)),
    ]
    for order in orders:
        match order:
            case Copy(group=group, source=source, target=target):
                blocks[group][target] = blocks[group][source]
            case Fill(group=group, block=block, content=content):
                blocks[group][block] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            case Scrub(group=group, block=block):
                blocks[group][block] = torch.zeros_like(blocks[group][block])
    cache.carry_out(orders)
    _require_blocks(cache, blocks, "carry_out is not one order after another")


def _content(block: Tensor) -> bytes:
    return block.numpy().tobytes()


def _fill(group: int, block: int, content: bytes) -> Fill:
    return Fill(group=group, block=BlockId(block), content=content, rung=0)


def _copy(group: int, source: int, target: int) -> Copy:
    return Copy(group=group, source=BlockId(source), target=BlockId(target))


def _scrubs(trial: Trial) -> None:
    cache = trial.cache()
    blocks = trial.fill(cache)
    cache.scrub(0, [1, 4])
    cache.scrub(1, [])
    for i in (1, 4):
        blocks[0][i] = torch.zeros_like(blocks[0][i])
    _require_blocks(cache, blocks, "scrub")


def _grows(trial: Trial) -> None:
    """Check that existing blocks keep their ids, bytes and results, and that new blocks are zeroed."""
    cache, step = trial.cache(), trial.steps()[0]
    blocks = trial.fill(cache)
    for layer in LAYERS:
        trial.write(cache, step, layer)
    before = [trial.attend(cache, step, x, trial.options(x)) for x in LAYERS]
    untouched = {(g, i) for g, some in enumerate(blocks) for i in range(len(some))} - step.blocks
    with torch.inference_mode():
        cache.grow([n + 4 * (g + 1) for g, n in enumerate(trial.num_blocks)])
    sizes = [cache.num_blocks[g] * len(some[0]) for g, some in enumerate(blocks)]
    _require(cache.nbytes == sum(sizes), f"after grow nbytes is {cache.nbytes}, not {sum(sizes)}")
    for g, i in untouched:
        _require(torch.equal(cache.read_block(g, i), blocks[g][i]), f"grow: group {g}, block {i} changed")
    for g, old in enumerate(trial.num_blocks):
        for i in range(old, cache.num_blocks[g]):
            _require(not bool(cache.read_block(g, i).any()), f"grow: new block {i} is not zero")
    for layer, expected in enumerate(before):
        for a, b in zip(trial.attend(cache, step, layer, trial.options(layer)), expected, strict=True):
            _require(torch.equal(a, b), f"grow: attention of layer {layer} changed")
    trial.write(cache, step, _SLIDING)
    try:
        cache.grow(list(trial.num_blocks))
    except ConfigError:
        return
    raise KVQError("grow: a pool shrank instead of raising ConfigError")


def _forgets_what_left_the_window(trial: Trial) -> None:
    """Check that table entries before the window are not read, since block managers leave them stale."""
    cache = trial.cache()
    for step in trial.steps():
        trial.write(cache, step, _SLIDING)
    options = trial.options(_SLIDING)
    expected = trial.attend(cache, step, _SLIDING, options)
    lost = [
        max(0, n - q - WINDOW + 1) // BLOCK_SIZE
        for q, n in zip(step.query_lens, step.context_lens, strict=True)
    ]
    _require(max(lost) > 0, "the trial has no context beyond its window")
    free = ({(_SLIDING, i) for i in range(cache.num_blocks[_SLIDING])} - step.blocks).pop()[1]
    cache.write_block(_SLIDING, free, torch.full_like(cache.read_block(_SLIDING, free), _POISON))
    stale = step.with_stale_entries(_SLIDING, lost, free)
    for a, b in zip(trial.attend(cache, stale, _SLIDING, options), expected, strict=True):
        _require(torch.equal(a, b), "blocks before the window reach the result")


CHECKS: dict[str, Callable[[Trial], None]] = {
    "writes and attends": _writes_and_attends,
    "forgets what left the window": _forgets_what_left_the_window,
    "ignores what free blocks hold": _ignores_what_free_blocks_hold,
    "flags rows that are not finite": _flags_rows_that_are_not_finite,
    "blocks do not overlap": _blocks_do_not_overlap,
    "carries out orders one by one": _carries_out_orders_one_by_one,
    "scrubs": _scrubs,
    "grows": _grows,
}
