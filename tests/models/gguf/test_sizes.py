"""Commands that read the header alone: plans and inspections tell the bytes of the stored types."""

import contextlib
import json
from math import prod

from kvq.capacity.plan.target import make_target
from kvq.cli import main
from kvq.models.gguf.files import read_gguf
from tests.helpers_models import save_model
from tests.models.gguf.kit import convert
from tests.models.gguf.test_files import save_in_blocks


def test_a_plan_counts_blocks_as_gpus_keep_them(tmp_path):
    path = save_in_blocks(tmp_path, "Q4_K")[1]
    stored = [one for one in read_gguf(path).tensors.values() if len(one.shape) == 2]
    linear, rest = make_target(path).terms()
    wanted = {one.name: (one.end - one.begin) // 144 * 148 for one in stored}  # as kernels keep blocks
    head, embedding = wanted.pop("output.weight"), wanted.pop("token_embd.weight") // 148 * 512
    assert linear.nbytes == sum(wanted.values())
    assert "x 0.578125 B (q4_k)" in linear.formula
    assert rest.nbytes == head + embedding + 2 * 5 * 256  # norms and the embedding in 16 bits
    assert make_target(str(path), weights="int4").held.rules != make_target(path).held.rules


def test_types_without_a_kernel_are_counted_in_16_bits(tmp_path):
    path = save_in_blocks(tmp_path, "Q5_K")[1]
    count = sum(prod(one.shape) for one in read_gguf(path).tensors.values())
    assert sum(term.nbytes for term in make_target(path).terms()) == 2 * count


def test_experts_are_counted_as_dequantized(tmp_path):
    folder = save_model(tmp_path / "folder", "mixtral", sliding_window=None)
    path = convert(folder, tmp_path / "a.gguf", kind="F16")
    experts = next(term for term in make_target(path).terms() if term.name == "expert weights")
    found = [one for one in read_gguf(path).tensors.values() if "_exps" in one.name]
    assert experts.nbytes == sum(one.end - one.begin for one in found)
    assert "(bf16)" in experts.formula


def test_inspect_tells_the_stored_types(tmp_path, capsys):
    path, out = save_in_blocks(tmp_path, "Q4_K")[1], tmp_path / "out.json"
    with contextlib.suppress(SystemExit):
        main(["inspect", str(path), "--json", str(out)])
    weights = json.loads(out.read_text())["rows"][0]["weights"]
    assert list(weights) == ["Q4_K", "F32"]
    assert ": Q4_K " in capsys.readouterr().out
