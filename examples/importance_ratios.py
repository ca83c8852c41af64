"""Rollouts for reinforcement learning whose importance ratios are exactly 1, although KV has 4 bits.

Policy gradients weight each token with p_trainer / p_rollout. If another engine, batch or cache format
computes one of the two, ratios of an unchanged policy scatter around 1, and trainers clip or correct for it.
An exact engine returns the same log-probabilities when it generates tokens and when it scores them.
"""

import math

import kvq

PROMPTS = ["The history of the river", "In the spring of 1914", "She said that"]

with kvq.LLM("tiny", kv="int4", exact=True, num_blocks=256) as llm:
    params = kvq.SamplingParams(n=4, max_tokens=32, temperature=1.0, seed=1, logprobs=0)
    rollouts = [
        (prompt, one)
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True)
        for one in output.outputs
    ]
    scored = llm.score([prompt for prompt, _ in rollouts], [one.token_ids for _, one in rollouts])

ratios = [
    math.exp(new.logprob - old.logprob)
    for (_, one), output in zip(rollouts, scored, strict=True)
    for new, old in zip(output.outputs[0].logprobs or (), one.logprobs or (), strict=True)
]
print(f"{len(rollouts)} rollouts, {len(ratios)} tokens, ratios from {min(ratios)} to {max(ratios)}")
assert set(ratios) == {1.0}
