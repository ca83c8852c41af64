"""Every reachable state of tiny pools is sound, and from each one everything can be freed again."""

import random

import pytest

from tests.blockmgr.tiny import EMPTY, World, build, can_reach, describe, explore

TURNS = ((0, 0, 0), (0, 1, 0))  # two prompts that share the first half of a block
WORLDS: dict[str, tuple[World, int]] = {
    "two requests, whose steps and commits interleave": (World(prompts=TURNS, num_sequences=2), 1_359),
}
LONG: dict[str, tuple[World, int]] = {
    "three requests": (World(prompts=((0,), *TURNS), splits=False), 5_738),
    "all prompts, two requests": (World(num_sequences=2), 277_930),
    "three requests, whose steps and commits interleave": (World(prompts=TURNS), 11_492),
    "three requests, four prompts": (World(prompts=((0,), *TURNS, (1, 0, 0)), splits=False), 23_555),
    "two prompts, two requests, rewound": (World(prompts=TURNS, num_sequences=2, truncates=True), 38_096),
}


def check(world: World, num_states: int) -> None:
    before = explore(world)
    assert len(before) == num_states
    assert can_reach(EMPTY, before) == before.keys()
    for state in random.Random(1).sample(sorted(before), 300):
        manager = build(world, state)
        manager.check_integrity()
        assert describe(manager) == state  # else the search looked at other states than it thinks


@pytest.mark.parametrize("name", WORLDS)
def test_all_states_are_sound_and_lead_back_to_the_empty_pool(name: str) -> None:
    check(*WORLDS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_all_states_of_a_larger_world_are_sound_and_lead_back_to_the_empty_pool(name: str) -> None:
    check(*LONG[name])


def test_the_search_would_find_a_state_without_a_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(prompts=((0,),), splits=False, num_sequences=1)
    whole = explore(world)
    assert can_reach(EMPTY, whole) == whole.keys()

    monkeypatch.setattr("tests.blockmgr.tiny.BlockManager.drop_cached", lambda manager: None)
    stuck = explore(world)
    assert can_reach(EMPTY, stuck) < stuck.keys()
