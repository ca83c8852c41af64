"""The checker needs neither torch nor kvq, takes what kvq wrote, and finds every damaged byte."""

import json
import random
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from kvq.blockmgr.prefix import PrefixIndex
from kvq.kernels.attend.options import Part
from kvq.models.describe.checkpoint import content_digest
from tests.waiting import HANG_S
from tools.make_vectors import make

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "spec" / "vectors"
DAMAGES = 1000
ALONE = """
import runpy, sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "kvq", "xxhash", "safetensors"):
            raise ImportError(f"the checker imports {name}")
sys.meta_path.insert(0, Refusing())
sys.path.insert(0, "spec")
sys.argv = ["check.py", *sys.argv[1:]]
runpy.run_path("spec/check.py", run_name="__main__")
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-I", "-c", ALONE, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S)


def test_all_vectors_are_accepted_without_torch_and_kvq() -> None:
    found = run(VECTORS)
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()) == len(list(VECTORS.glob("*.vector.json"))) > 30


def test_the_vectors_are_made_again_byte_for_byte(tmp_path: Path) -> None:
    make(tmp_path)
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == {
        x.name: x.read_bytes() for x in VECTORS.iterdir()
    }
    assert sum(len(x.read_bytes()) for x in VECTORS.iterdir()) < 1_100_000


def test_a_prefix_file_of_ones_own_is_checked_with_its_layout(tmp_path: Path) -> None:
    vector = json.loads((VECTORS / "prefix-staged.vector.json").read_bytes())
    (tmp_path / "layout.json").write_text(json.dumps(vector["layout"]))
    own = tmp_path / "own.kvqprefix"
    raw = bytearray((VECTORS / "staged.kvqprefix").read_bytes())
    own.write_bytes(raw)
    assert "all digests hold" in run(own, "--layout", tmp_path / "layout.json").stdout
    raw[-1] ^= 1
    own.write_bytes(raw)
    found = run(own, "--layout", tmp_path / "layout.json")
    assert found.returncode == 1
    assert "blocks[" in found.stderr


def test_a_recipe_of_ones_own_is_checked(tmp_path: Path) -> None:
    data = json.loads((VECTORS / "kvq.json").read_bytes())
    data["static_scales"]["layers"][1]["v"][2] += 0.5
    (tmp_path / "kvq.json").write_text(json.dumps(data))
    assert run(VECTORS / "kvq.json").returncode == 0
    found = run(tmp_path / "kvq.json")
    assert found.returncode == 1
    assert "static_scales.layers[1].v: its digest is" in found.stderr


def test_every_damaged_byte_of_the_vectors_is_found(spec, tmp_path: Path) -> None:
    check = spec["check"]
    folder = tmp_path / "vectors"
    shutil.copytree(VECTORS, folder)
    files = sorted(folder.iterdir())
    users: dict[str, str] = {}  # of every file that a vector names, one of those vectors
    for path in folder.glob("*.vector.json"):
        vector = json.loads(path.read_bytes())
        own = {x["file"] for x in vector.get("arrays", {}).values()} | {path.name, vector.get("file")}
        users |= dict.fromkeys(own, path.name)
    digests, source, unnamed = check.check_index(folder), random.Random(27), 0
    for _ in range(DAMAGES):
        path = source.choice(files)
        raw = path.read_bytes()
        at, bits = source.randrange(len(raw)), source.randrange(1, 256)
        path.write_bytes(raw[:at] + bytes([raw[at] ^ bits]) + raw[at + 1 :])
        try:
            if path.name == "index.json":
                with pytest.raises(check.Wrong):
                    check.check_index(folder)
                continue
            try:
                check.check_vector(folder, users[path.name])
            except check.Wrong:
                continue
            unnamed += 1
            with pytest.raises(check.Wrong):
                check.check_file(folder, path.name, digests[path.name])
        finally:
            path.write_bytes(raw)
    assert unnamed < DAMAGES / 50  # what no field's own check sees: words in descriptions, spaces


@pytest.mark.parametrize("name", ["plain", "staged"])
def test_every_damaged_byte_of_a_prefix_file_is_found_by_its_own_digests(spec, name: str) -> None:
    raw = (VECTORS / f"{name}.kvqprefix").read_bytes()
    vector = json.loads((VECTORS / f"prefix-{name}.vector.json").read_bytes())
    layout, source = spec["layouts"].read_layout(vector["layout"]), random.Random(28)
    header = 8 + int.from_bytes(raw[:8], "little")
    spec["prefixes"].check_prefix(raw, layout)
    for i in range(400):
        at = source.randrange(header if i % 2 else len(raw))
        damaged = raw[:at] + bytes([raw[at] ^ source.randrange(1, 256)]) + raw[at + 1 :]
        with pytest.raises(spec["recipes"].Wrong):
            spec["prefixes"].check_prefix(damaged, layout)


def test_xxh3_is_that_of_the_library(spec) -> None:
    source = random.Random(29)
    for size in (241, 256, 257, 1023, 1024, 1025, 1088, 1089, 2048, 9999):
        data = source.randbytes(size)
        assert spec["xxh3"].xxh3_128(data) == xxhash.xxh3_128(data).digest()


def examples(key: str) -> list[dict]:
    """The JSON examples of docs/spec.md that have a key."""
    text = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    found = [json.loads(x) for x in re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)]
    return [x for x in found if key in x]


def test_the_rows_of_the_document_are_encoded_as_it_says(spec) -> None:
    codec = spec["codec"]
    (example,) = examples("rows")
    x = np.array([example["row"]], np.float32)
    assert len(example["rows"]) == 7
    for own in example["rows"]:
        codes, scales = codec.encode(x, spec["names"].parse(own["format"], x.shape[-1]))
        assert (codes.tobytes().hex(" "), scales.tobytes().hex(" ")) == (own["codes"], own["scales"])
    (example,) = examples("block")
    block = np.stack((x, x + 1), axis=1)[0]
    found = codec.encode_block(block, spec["names"].parse(example["block"]["format"], x.shape[-1]))
    assert [y.tobytes().hex(" ") for y in found] == [
        example["block"][p] for p in ("codes", "scales", "means")
    ]
    (example,) = examples("channels")
    block = np.stack((x, -x, 2 * x), axis=1)[0]
    assert len(example["channels"]) == 4
    for own in example["channels"]:
        codes, scales, _ = codec.encode_block(block, spec["names"].parse(own["format"], x.shape[-1]))
        assert (codes.tobytes().hex(" "), scales.tobytes().hex(" ")) == (own["codes"], own["scales"])


def test_the_digest_of_a_model_is_what_the_document_says(tmp_path: Path) -> None:
    tensors = {"b.weight": torch.arange(6.0).view(2, 3), "a.norm": torch.ones(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    kinds = {"a.norm": "BF16 (5,)", "b.weight": "F32 (2, 3)"}
    lines = []
    for name, kind in kinds.items():
        raw = tensors[name].view(torch.uint8).numpy().tobytes()
        lines.append(f"{name} {kind} {xxhash.xxh3_128(raw).hexdigest()}")
    expected = xxhash.xxh3_128("\n".join(lines).encode()).hexdigest()
    assert content_digest([tmp_path / "model.safetensors"]) == expected


def test_salts_begin_chains_as_the_document_says() -> None:
    index = PrefixIndex(block_size=2, num_groups=1, identity=b"model")
    start = b"kvq-prefix-1" + sha256(b"model").digest()
    for kind, salt, shared in ((b"t", b"anna", None), (b"s", b"all", "all")):
        assert index.root_digest("anna", shared) == sha256(start + kind + salt).digest()
        salted = b"c" + kind + len(salt).to_bytes(8, "little") + salt + b"own"
        assert index.root_digest("anna", shared, "own") == sha256(start + salted).digest()


def test_the_chain_and_the_edges_of_the_document_are_right(spec) -> None:
    (own,) = examples("chain")
    args = own["tokens"], own["block_size"], own["identity"].encode(), own["tenant"]
    assert [x.hex() for x in spec["prefixes"].chain(*args)] == own["chain"]
    index = PrefixIndex(block_size=2, num_groups=1, identity=own["identity"].encode())
    assert index.root_digest(own["tenant"]).hex() == own["chain"][0]
    (own,) = examples("edges")
    part = Part(is_young=False, recent=own["recent"], block_size=own["block_size"])
    assert {p: part.edge(int(p)) for p in own["edges"]} == own["edges"]
