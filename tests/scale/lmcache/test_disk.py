"""LMCache's own processor, L1 memory and disk adapter with the serde `kvq`."""

import os
import random
import select
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmcache")

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import create_serde_processor
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

from kvq.errors import ConfigError, DamagedData
from kvq.formats import KVRecipe
from kvq.integrations.lmcache import register
from kvq.kernels.codec import decode, encode, rotate
from tests.waiting import HANG_S

LAYERS, HEADS, DIM, TOKENS = 4, 8, 128, 256  # 256 tokens are what LMCache cuts prompts into
SHAPE = torch.Size((2, LAYERS, TOKENS, HEADS * DIM))


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register()
    register()  # LMCache refuses a name twice, kvq asks first


def rows(seed: int = 0) -> torch.Tensor:
    """K and V, bf16 `SHAPE`, with an outlier channel a head, as K has."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    x[..., 1::DIM] *= 8
    return x.bfloat16()


def memory(content: torch.Tensor) -> TensorMemoryObj:
    """A piece of L1 memory as LMCache hands it to a serde."""
    raw = content.clone().flatten().view(torch.uint8)
    about = MemoryObjMetadata(
        shape=content.shape,
        dtype=content.dtype,
        address=0,
        phy_size=raw.numel(),
        ref_count=1,
        shapes=[content.shape],
        dtypes=[content.dtype],
    )
    return TensorMemoryObj(raw, about, None)


def key(number: int, model: str = "tiny") -> ObjectKey:
    return ObjectKey(chunk_hash=number.to_bytes(8, "big"), model_name=model, kv_rank=0)


class Disk:
    """LMCache's disk adapter behind a serde, put together as its storage manager does."""

    def __init__(self, folder: Path, serde: dict[str, object]) -> None:
        spec = {"type": "fs", "base_path": str(folder), "serde": serde}
        config = FSL2AdapterConfig.from_dict(spec)
        config.serde_config = L2AdapterConfigBase._parse_serde_config(spec)
        self.folder = folder
        size = 64 << 20
        self.l1 = L1Manager(
            L1ManagerConfig(
                memory_config=L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name="")
            )
        )
        self.adapter = SerdeL2AdapterWrapper(
            create_l2_adapter(config, None), create_serde_processor(config.serde_config), self.l1
        )

    def store(self, number: int, content: torch.Tensor) -> bool:
        task = self.adapter.submit_store_task([key(number)], [memory(content)])
        _wait(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[task].is_successful()

    def load(self, number: int) -> torch.Tensor | None:
        """What is stored under a key, or None for a miss."""
        into = memory(torch.full(SHAPE, float("nan"), dtype=torch.bfloat16))
        task = self.adapter.submit_load_task([key(number)], [into])
        _wait(self.adapter.get_load_event_fd())
        return into.tensor if self.adapter.query_load_result(task).test(0) else None

    def file(self, number: int) -> Path:
        [found] = [path for path in self.folder.iterdir() if key(number).chunk_hash.hex() in path.name]
        return found

    def close(self) -> None:
        self.adapter.close()
        self.l1.close()


def _wait(notifier: int) -> None:
    ready, _, _ = select.select([notifier], [], [], HANG_S)
    assert ready, "LMCache has not answered"
    os.read(notifier, 8)


@pytest.fixture
def disk(tmp_path, request):
    made = Disk(tmp_path / "cache", {"type": "kvq", "head_dim": DIM, **request.param})
    yield made
    made.close()


def sides(x: torch.Tensor, kv: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of K and V: the rows, what the reference makes of them, and half a step of every element's code."""
    found = []
    layer = KVRecipe.uniform(kv, [(DIM, DIM)]).layers[0]
    for part, fmt in zip(x.float(), (layer.k, layer.v), strict=True):
        own = part.unflatten(-1, (HEADS, DIM))
        codes, scales = encode(own, fmt)
        half = torch.zeros_like(own)
        if fmt.code.is_grouped:
            steps = scales.float().unflatten(-1, (-1, 2))[..., 0]
            half = steps.repeat_interleave(DIM // steps.shape[-1], -1) / 2
        elif scales is not None:
            half = scales.float().expand_as(own) / 2
        back = decode(codes, scales, fmt)
        found.append((own, rotate(back) if fmt.rotated else back, half))
    return found


@pytest.mark.parametrize(
    ("disk", "ratio"),
    [
        ({"kv": kv}, ratio)
        for kv, ratio in (
            ("int8_per_token_head", 1.95),
            ("int8_per_token_head/int4_g32_s8_rot", 2.5),
            ("int4_g32_s8_rot", 3.5),
            ("int2_g32_s8_rot", 5.0),
            ("bf16", 0.99),
        )
    ],
    indirect=["disk"],
    ids=lambda value: value.get("kv") if isinstance(value, dict) else None,
)
def test_a_chunk_comes_back_from_the_disk(disk, ratio, request, record_property):
    x, kv = rows(), request.node.callspec.params["disk"]["kv"]
    assert disk.store(1, x)
    found = disk.load(1)
    size = disk.file(1).stat().st_size
    record_property("ratio", x.nbytes / size)
    print(f"\n{kv}: {x.nbytes} bytes of bf16 became {size}, {x.nbytes / size:.2f} times fewer")
    assert x.nbytes / size > ratio
    for (own, wanted, half), got in zip(sides(x, kv), found.float(), strict=True):
        got = got.unflatten(-1, (HEADS, DIM))
        torch.testing.assert_close(got, wanted, rtol=2**-8, atol=1e-6)
        if "int" in kv:
            # Rotations keep lengths: a row's error is at most that of its codes, half a step each, and bf16's
            error, bound = (got - own).norm(dim=-1), half.norm(dim=-1) + own.norm(dim=-1) * 2**-8
            print(f"  largest error {(error / bound).max():.2f} of half a step in every element")
            assert (error <= bound).all()
        else:
            assert torch.equal(got, own)
    assert disk.load(2) is None


@pytest.mark.parametrize(("disk", "ratio"), [({"kv": "int4"}, 3.4), ({"kv": "int8"}, 1.9)], indirect=["disk"])
def test_bare_names_keep_k_per_channel(disk, ratio):
    x = rows()
    x[0, ..., 5::DIM] += 100  # a bias: per token 4 bits would be spent on it
    assert disk.store(1, x)
    assert x.nbytes / disk.file(1).stat().st_size > ratio
    error = (disk.load(1) - x).float().abs()
    assert error[0, ..., 5::DIM].max() < 1
    assert error.mean() < 0.2


@pytest.mark.parametrize("disk", [{"kv": "int4"}], indirect=True)
def test_every_one_of_1000_flipped_bits_is_found(disk, caplog):
    x = rows()
    assert disk.store(1, x)
    path = disk.file(1)
    good, rng = path.read_bytes(), random.Random(27)
    front = [rng.randrange(8 * 800) for _ in range(100)]  # the header is small: looked at on purpose
    for bit in (*front, *(rng.randrange(8 * len(good)) for _ in range(900))):
        broken = bytearray(good)
        broken[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(broken)
        assert disk.load(1) is None, f"bit {bit} was not found"
    path.write_bytes(good)
    assert disk.load(1) is not None
    reasons = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert reasons == [DamagedData] * 1000  # by kvq, each time, and not for something else


@pytest.mark.parametrize("disk", [{"kv": "int4"}], indirect=True)
def test_cut_files_and_files_of_other_chunks_are_misses(disk):
    assert disk.store(1, rows(1))
    assert disk.store(2, rows(2))
    first, second = disk.file(1), disk.file(2)
    good = first.read_bytes()
    first.write_bytes(second.read_bytes())
    assert disk.load(1) is None
    first.write_bytes(good[:-1])
    assert disk.load(1) is None
    first.write_bytes(good)
    assert disk.load(1) is not None


@pytest.mark.parametrize("disk", [{"kv": "int4"}], indirect=True)
def test_infinite_rows_are_not_stored(disk):
    x = rows()
    x[0, 1, 2, 3] = float("nan")
    assert not disk.store(1, x)
    assert disk.load(1) is None


def test_a_recipe_of_its_own_for_every_layer(tmp_path):
    formats = [KVRecipe.uniform(kv, [(DIM, DIM)]).layers[0] for kv in ("int8", "k8v4", "int4", "int2")]
    path = tmp_path / "kvq.json"
    KVRecipe(layers=tuple(formats)).save(path)
    made = Disk(tmp_path / "cache", {"type": "kvq", "kv": str(path), "max_workers": 2})
    try:
        assert made.store(1, rows())
        assert made.load(1) is not None
        other = Disk(made.folder, {"type": "kvq", "kv": "int4", "head_dim": DIM})
        assert other.load(1) is None
        other.close()
    finally:
        made.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "needs kv, such as 'int4'"),
        ({"kv": "int4"}, "needs the model's head_dim"),
        ({"kv": "int7", "head_dim": 64}, "unknown KV format 'int7'"),
        ({"kv": "int4", "head_dims": 64}, "did you mean 'head_dim'"),
        ({"kv": "int4", "head_dim": 0}, "at least 1"),
        ({"kv": "int4_g48", "head_dim": 64}, "group size must divide"),
        ({"kv": "none.json"}, "can't read recipe none.json"),
    ],
)
def test_options_are_checked_when_the_adapter_is_made(options, why):
    config = L2AdapterConfigBase._parse_serde_config({"serde": {"type": "kvq", **options}})
    with pytest.raises(ConfigError, match=why):
        create_serde_processor(config)


def test_sizes_are_known_before_and_other_chunks_are_refused():
    serde = create_serde_processor(
        L2AdapterConfigBase._parse_serde_config({"serde": {"type": "kvq", "kv": "int4", "head_dim": DIM}})
    )
    layout = MemoryLayoutDesc(shapes=[SHAPE], dtypes=[torch.bfloat16])
    source, room = (
        memory(rows()),
        memory(torch.zeros(serde.estimate_serialized_size(layout), dtype=torch.uint8)),
    )
    serde.submit_serialize([source], [room], [key(1)])
    _wait(serde.get_serialize_event_fd())
    assert room.get_size() == room.get_physical_size()
    latents = MemoryLayoutDesc(shapes=[torch.Size((1, 4, 256, 576))], dtypes=[torch.bfloat16])
    with pytest.raises(ConfigError, match="latents"):
        serde.estimate_serialized_size(latents)
    serde.close()


def test_lmcaches_own_command_line_knows_it():
    run = subprocess.run(
        [sys.executable, "-m", "kvq.integrations.lmcache", "--help"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0
    assert "usage: lmcache" in run.stdout
