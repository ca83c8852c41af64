"""The parts of the simulator: workloads, the fake model and the direct computation of its answers."""

from array import array
from itertools import islice

import pytest

from kvq.blockmgr import BlockManager, Sequence
from kvq.capacity.fleet.records import percentile
from kvq.errors import ConfigError
from kvq.scheduler import Branch, Priority, Request, StepPlan
from tests.capacity.harness import FakeModel, Faults, Mix, Pools, jobs
from tests.capacity.harness.alone import Context


def test_jobs_are_repeated_by_their_seed_and_come_in_order() -> None:
    mix = Mix(rate=10.0, prompt_tokens=20, output_tokens=10, prefix_share=0.5)
    first, again, other = (list(islice(jobs(mix, seed), 300)) for seed in (1, 1, 2))
    assert first == again != other
    times = [job.arrival_s for job in first]
    assert times == sorted(times)
    assert 20 < times[-1] < 45


def test_a_mix_is_what_it_says() -> None:
    mix = Mix(
        rate=10.0, prompt_tokens=50, output_tokens=8, longest=100, vocabulary=1000, prefix_share=0.5,
        batch_share=0.25, branched_share=0.4, num_tenants=3, unlimited_share=0.2, impatient_share=0.5,
    )  # fmt: skip
    some = list(islice(jobs(mix, 4), 2000))
    lengths = sorted(len(job.prompt) for job in some)
    assert 50 <= lengths[1000] <= 75  # a shared prefix comes before them
    assert lengths[-1] <= 100
    assert 0.2 < sum(job.priority is Priority.BATCH for job in some) / 2000 < 0.3
    assert 0.35 < sum(job.num_branches > 1 for job in some) / 2000 < 0.45
    assert 0.15 < sum(job.is_beam_search for job in some) / 2000 < 0.25
    assert {job.tenant for job in some} == {"tenant-0", "tenant-1", "tenant-2"}
    starts = [tuple(job.prompt[:4]) for job in some if len(job.prompt) >= 4]
    assert len(set(starts)) < 0.7 * len(starts)


def test_impossible_mixes_and_probabilities_are_refused() -> None:
    with pytest.raises(ConfigError, match="rate must be above 0, got 0"):
        Mix(rate=0, prompt_tokens=1, output_tokens=1)
    with pytest.raises(ConfigError, match=r"probability of nan must be 0 to 1, got 1.5"):
        Faults(nan=1.5)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 50) == 0.0
    assert [percentile([3.0, 1.0, 2.0], rank) for rank in (1, 33, 34, 66, 67, 99, 100)] == [
        1,
        1,
        2,
        2,
        3,
        3,
        3,
    ]


class Lane:
    """One sequence and the fake model, step by step."""

    def __init__(self, windows: list[int | None], size: int) -> None:
        pools = Pools(num_blocks=[40] * len(windows), block_size=size, windows=windows)
        self.model = FakeModel(pools, 1)
        self.manager = BlockManager(num_blocks=pools.num_blocks, block_size=size, windows=windows)
        self.sequence: Sequence = self.manager.new_sequence()
        self.branch = Branch(
            request=Request(id="", tokens=array("I"), max_tokens=1), tokens=array("I"), row=0
        )

    def run(self, tokens: list[int]) -> int:
        """The key of the last of some tokens."""
        self.manager.extend([(self.sequence, len(tokens))])
        plan = StepPlan(
            number=0, branches=[self.branch], num_decodes=0, counts=[len(tokens)], drafts=[0],
            ends=[self.sequence.length], samples=[True], token_ids=tokens, orders=self.manager.take_orders(),
            table_changes=[(0, *change) for change in self.sequence.take_changes()],
        )  # fmt: skip
        ((key,),) = self.model.run(plan, [])
        self.manager.commit(self.sequence)
        return key


@pytest.mark.parametrize("windows", [[None, None], [None, 1], [3, None], [7, 20]])
@pytest.mark.parametrize("chunks", [[30], [1] * 30, [7, 1, 1, 13, 8], [29, 1]])
@pytest.mark.parametrize("size", [1, 4])
def test_chunks_and_blocks_do_not_change_what_the_fake_model_says(
    windows: list[int | None], chunks: list[int], size: int
) -> None:
    tokens = [(i * 17) % 11 for i in range(30)]
    lane, at = Lane(windows, size), 0
    for count in chunks:
        key = lane.run(tokens[at : at + count])
        at += count
        assert key == Context(windows, array("I", tokens[:at])).key


def test_every_token_matters_and_with_a_window_of_one_only_the_last() -> None:
    tokens = array("I", [1] * 20)
    for window, first in [(None, 0), (4, 0), (1, 19)]:  # keys carry on what lies behind a longer window
        key = Context([window], tokens).key
        for i in range(20):
            changed = array("I", tokens)
            changed[i] = 2
            assert (Context([window], changed).key != key) == (i >= first)
