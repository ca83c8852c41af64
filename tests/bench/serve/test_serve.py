"""`kvq bench serve`: what a load over HTTP tells, and what its client can bear and do."""

import asyncio
import json

import pytest

from benchmarks.rude import metrics, num_sockets, some_rude
from kvq import cli
from kvq.bench.engine.load import Load
from kvq.bench.serve.client import Endpoint
from kvq.bench.serve.process import ServerProcess
from kvq.bench.serve.serve import as_served, outcomes, run_load
from kvq.capacity.lengths import Lengths
from kvq.errors import ConfigError
from tests.waiting import HANG_S

SMALL = ["--requests", "5", "--input-len", "7:40", "--output-len", "3:6", "--repeats", "2"]


def run(*args):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", *args])
    return ended.value.code or 0


def test_rows_tell_what_came_of_a_load(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert run("--kv", "int4", *SMALL, "--num-blocks", "64", "--no-pin", "--json", str(path)) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["kv"] for row in rows] == ["int4"]
    for row in rows:
        assert (row["sent"], row["complete"], row["refused"], row["broken"]) == (10, 10, 0, 0)
        assert row["check_equal"]
        assert row["output_tokens_per_s"] > 0
        assert row["ttft_ms_p50"] <= row["ttft_ms_p99"]
    assert "1 of 1" in capsys.readouterr().out


def test_wrong_wishes_are_said_before_anything_starts(capsys):
    for args, message in (
        (("--rate", "fast"), "--rate takes"),
        (("--rate", "3", "--concurrency", "2"), "give one of them"),
        (("--concurrency", "1,2"), "got '1,2'; run the command once for each"),
        (("--url", "ftp://a"), "URL must be an address"),
        (("--url", "http://127.0.0.1:9"), "no server answers"),
        (("--url", "http://127.0.0.1:9", "--model", "tiny"), "leave it out with --url"),
    ):
        assert run(*args) == 2
        assert message in capsys.readouterr().err


def test_addresses():
    assert Endpoint.from_url("http://a:81/").port == 81
    for url in ("https://a", "a:80", "http://"):
        with pytest.raises(ConfigError):
            Endpoint.from_url(url)


@pytest.mark.long  # a server of its own
def test_rude_clients_leave_nothing_behind():
    """Resets and stalls on a small pool; benchmarks/reliability.py does it 10,000 times."""

    async def main():
        options = ["--model", "tiny", "--kv", "int4", "--num-blocks", "48", "--max-num-seqs", "8"]
        async with ServerProcess([*options, "--max-queue", "10000", "--max-kv-pressure", "1"]) as server:
            await metrics(server)
            idle = num_sockets(server)
            load = Load(
                num_requests=150,
                input_lengths=Lengths(low=1, high=64),
                output_lengths=Lengths(low=1, high=24),
                vocab_size=server.model["vocab_size"],
                max_context=server.model["max_model_len"],
            )
            leave = some_rude(resets=0.3, stalls=0.1, stall_s=0.3, seed=3)
            sent = await run_load(server.target, load.draw(0), 24, leave=leave)
            polite = [one for one in sent if one.leave is None]
            assert 60 < len(polite) < 120
            assert all(one.is_complete for one in polite)
            assert outcomes(sent)["other"] == 0
            assert len(as_served(sent).served) >= len(polite)
            left = None
            async with asyncio.timeout(HANG_S):
                while left is None or left[:2] != (0, 0) or left[2] > 0:
                    await asyncio.sleep(0.05)
                    seen = await metrics(server)
                    left = seen["kvq_blocks/0/live"], seen["kvq_active_requests"], num_sockets(server) - idle

    asyncio.run(main())
