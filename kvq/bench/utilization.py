"""How much of the allocated memory holds tokens: blocks, and beside them one buffer per sequence."""

import random
from dataclasses import dataclass
from statistics import fmean

from kvq.bench.timing import percentile
from kvq.blockmgr import BlockManager, Sequence

_MEDIAN, _SIGMA, _LONGEST = 500, 1.0, 4096  # tokens, log-normal; spread of the logarithm; tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """Tokens held / token slots allocated, over a run of growing and ending sequences."""

    block_size: int  # tokens
    median_length: int  # tokens, of the log-normal lengths
    sequences: int
    samples: int
    paged_mean: float
    paged_p10: float
    contiguous_mean: float  # each sequence owns a buffer of the longest length
    longest: int  # tokens


def measure_utilization(
    *, block_size: int = 16, num_sequences: int = 200, rounds: int = 400, seed: int = 0
) -> Utilization:
    """Keep `num_sequences` sequences running; each grows to a length of its own and is replaced.

    Half of a length is the prompt, the rest is decoded 16 tokens a round.
    """
    rng = random.Random(seed)
    manager = BlockManager(num_blocks=[num_sequences * -(-_LONGEST // block_size)], block_size=block_size)
    running: dict[Sequence, int] = {}  # final length
    paged, contiguous = [], []
    for at in range(rounds):
        while len(running) < num_sequences:
            length = min(_LONGEST, max(2, round(rng.lognormvariate(0, _SIGMA) * _MEDIAN)))
            sequence = manager.new_sequence()
            manager.extend([(sequence, max(1, length // 2))])
            manager.commit(sequence)
            running[sequence] = length
        if at >= rounds // 4:  # lengths have mixed by then
            paged.append(manager.utilization())
            held = sum(sequence.length for sequence in running)
            contiguous.append(held / (_LONGEST * len(running)))
        for sequence, length in list(running.items()):
            if sequence.length >= length:
                manager.free(sequence)
                del running[sequence]
            else:
                manager.extend([(sequence, min(16, length - sequence.length))])
                manager.commit(sequence)
    manager.check_integrity()
    return Utilization(
        block_size=block_size,
        median_length=_MEDIAN,
        sequences=num_sequences,
        samples=len(paged),
        paged_mean=round(fmean(paged), 4),
        paged_p10=round(percentile(paged, 10), 4),
        contiguous_mean=round(fmean(contiguous), 4),
        longest=_LONGEST,
    )
