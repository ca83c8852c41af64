"""Traces of agents: made up from a seed, replayed against the engine, and compared between two checkouts.

    python tools/make_bench_model.py --out build/bench-model
    python -m benchmarks.agents.generate --preset bench --out build/agents.jsonl [--minutes 2]
    python -m benchmarks.agents.replay --trace build/agents.jsonl --model build/bench-model
    python -m benchmarks.agents.compare --trace build/agents.jsonl --model build/bench-model --repeats 2 \
        --variant before ../before '{"kv": "int8"}' --variant after . '{"kv": "int8", "kv_host": "2GiB"}'
    python -m benchmarks.agents.simulated --trace build/agents.jsonl --model build/bench-model \
        --variant alone '{}' --variant host '{"kv_host": "2GiB"}'
    python -m benchmarks.agents.mooncake --trace build/agents.jsonl --out build/mooncake.jsonl

`trace` describes the format of the files.
"""
