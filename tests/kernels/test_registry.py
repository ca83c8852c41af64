"""Which kernel runs: chosen, fallen back to, or refused with every reason."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kvq.errors import ConfigError, UnsupportedKernel
from kvq.formats import KVRecipe
from kvq.kernels import (
    BACKENDS,
    Device,
    Kernel,
    KernelSpec,
    Support,
    check_backend,
    register,
    registered,
    registry,
    select,
)
from kvq.kernels.gpu import support

OPERATIONS = ("write_kv", "attend", "merge_partials", "gather_dense", "copy_blocks")
CPU = Device(type="cpu", name="cpu")
MI300X = Device(type="cuda", name="AMD Instinct MI300X", gfx="gfx942")
OLD_GPUS = [
    Device(type="cuda", name="A100", capability=(8, 0)),
    Device(type="cuda", name="T4", capability=(7, 5)),
    Device(type="cuda", name="L4", capability=(8, 9)),
]


def spec(kv: str) -> KernelSpec:
    """A layer of 6 query heads over 3 KV heads in that format."""
    layer = KVRecipe.uniform(kv, [(64, 64)]).layers[0]
    return KernelSpec(formats=layer, q_heads=6, kv_heads=3, block_size=32)


@pytest.mark.parametrize("kv", ["int8_rot", "int8_per_head_rot", "int8_rot/int4"])
def test_products_of_rotated_int8_are_refused_and_taken_in_16_bits(
    kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were wrong on an H200. Rotated FP8, and INT8 that isn't rotated, were right."""
    monkeypatch.setattr(support, "_has_triton", lambda: True)
    gpu = Device(type="cuda", name="H200", capability=(9, 0))
    refused = support.supports_8bit(spec(kv), gpu)
    assert not refused.yes
    assert "backend triton is right" in refused.reason
    assert support.supports(spec(kv), gpu).yes
    for other in ("int8", "int8_per_head", "fp8_rot", "int8/int8_rot"):
        assert support.supports_8bit(spec(other), gpu).yes


def test_means_and_scales_per_channel_lie_in_whole_words_or_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support, "_has_triton", lambda: True)
    gpu = Device(type="cuda", name="H200", capability=(9, 0))
    for kv in ("int4_per_channel/int8", "int8/int4_per_channel", "int4_mean/int8"):
        for dim, is_taken in ((42, False), (60, True)):
            formats = KVRecipe.uniform(kv, [(dim, dim)]).layers[0]
            found = support.supports(KernelSpec(formats=formats, q_heads=4, kv_heads=2, block_size=16), gpu)
            assert found.yes == is_taken, (kv, dim)


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """The registry's list, holding the reference only and put back after the test."""
    kernels = [k for k in registry._KERNELS if k.backend == "reference" and k.operation in OPERATIONS]
    monkeypatch.setattr(registry, "_KERNELS", kernels)
    registry._log_fallback.cache_clear()
    yield kernels
    registry._log_fallback.cache_clear()


def add(backend: str, support: Support, operation: str = "attend") -> Kernel:
    """Register a kernel that answers so."""
    kernel = Kernel(operation=operation, backend=backend, run=lambda: backend, supports=lambda *_: support)
    register(kernel)
    return kernel


def test_the_reference_has_every_operation() -> None:
    of_some = ["attend_latent", "rope_write", "seal"]  # in C++ CpuDecoder has the latter
    assert sorted(registered("reference")) == sorted([*OPERATIONS, *of_some])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("device", [CPU, *OLD_GPUS, Device(type="mps", name="mps")], ids=lambda d: d.name)
def test_every_operation_has_a_kernel_on_every_device(operation: str, device: Device) -> None:
    for kv in ("fp32", "bf16", "fp8", "int8_per_head", "int4", "int2"):
        assert select(operation, spec(kv), device).operation == operation


@pytest.mark.parametrize("kv", ["fp8", "fp8_per_head", "fp8_rot", "fp8/int4", "bf16/fp8"])
@pytest.mark.parametrize("device", OLD_GPUS, ids=lambda d: d.name)
def test_fp8_is_only_storage_so_gpus_without_fp8_run_it_wherever_they_run_int8(
    device: Device, kv: str
) -> None:
    assert {select(operation, spec(kv), device).operation for operation in OPERATIONS} == set(OPERATIONS)
    for kernel in registry._KERNELS:
        if kernel.backend == "triton-8bit":  # which multiplies FP8 as it is
            continue
        if kernel.operation in OPERATIONS and kernel.supports(spec("int8"), device).yes:
            assert kernel.supports(spec(kv), device).yes, f"{kernel.backend} {kernel.operation}"


def test_auto_takes_the_first_backend_that_supports_the_spec(own_kernels: list[Kernel]) -> None:
    cpu = add("cpu", Support(True))
    assert select("attend", spec("int4"), CPU) is cpu
    triton = add("triton", Support(True))
    assert select("attend", spec("int4"), CPU) is triton
    assert select("write_kv", spec("int4"), CPU).backend == "reference"
    assert len(own_kernels) == len(OPERATIONS) + 2


def test_falling_back_to_the_reference_logs_each_reason_once(
    own_kernels: list[Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    add("triton", Support(False, "needs a GPU"))
    add("cpu", Support(False, "was not built"))
    with caplog.at_level(logging.WARNING, logger="kvq"):
        for _ in range(3):
            assert select("attend", spec("int4"), CPU) is own_kernels[1]
    messages = [r.getMessage() for r in caplog.records]
    assert messages == ["kernels run on the reference backend (triton: needs a GPU; cpu: was not built)"]


def test_a_compiled_kernel_is_no_fallback_worth_a_line(
    own_kernels: list[Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    add("triton", Support(False, "needs a GPU"))
    cpu = add("cpu", Support(True))
    with caplog.at_level(logging.WARNING, logger="kvq"):
        assert select("attend", spec("int4"), CPU) is cpu
        assert select("write_kv", spec("int4"), CPU).backend == "reference"
    assert not caplog.records
    assert own_kernels[-1] is cpu


def test_no_line_about_backends_that_are_made_for_other_devices(caplog: pytest.LogCaptureFixture) -> None:
    registry._log_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, logger="kvq"):
        assert select("copy_blocks", spec("int4"), CPU).backend == "cpu"  # Triton's is for GPUs
    assert not caplog.records


@pytest.mark.usefixtures("own_kernels")
def test_without_other_backends_the_reference_is_no_fallback_worth_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="kvq"):
        assert select("attend", spec("int4"), CPU).backend == "reference"
    assert not caplog.records


@pytest.mark.usefixtures("own_kernels")
def test_a_backend_that_the_user_named_is_refused_and_never_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    add("triton", Support(False, "head_dim 60 is not a power of two"))
    with pytest.raises(UnsupportedKernel, match="triton: head_dim 60 is not a power of two") as refused:
        select("attend", spec("k8v4"), OLD_GPUS[0], "triton")
    message = str(refused.value)
    assert "no backend can run attend for K int8_per_token_head, V int4_g32_s8_rot on A100" in message
    assert "--backend reference" in message
    with pytest.raises(UnsupportedKernel, match="cpu: has no attend kernel"):
        select("attend", spec("int4"), CPU, "cpu")
    assert not caplog.records


def test_when_nothing_fits_every_backends_reason_is_listed(own_kernels: list[Kernel]) -> None:
    own_kernels.clear()
    add("triton", Support(False, "needs a GPU"))
    add("reference", Support(False, "is switched off"))
    with pytest.raises(
        UnsupportedKernel, match=r"triton: needs a GPU; cpu: has no attend kernel; reference: is switched off"
    ):
        select("attend", spec("int4"), CPU)


@pytest.mark.usefixtures("own_kernels")
def test_an_operation_has_one_kernel_per_backend() -> None:
    add("cpu", Support(True))
    with pytest.raises(ConfigError, match="attend already has a cpu kernel"):
        add("cpu", Support(True))
    with pytest.raises(ConfigError, match="attend already has a reference kernel"):
        add("reference", Support(True))


def test_fp32_arithmetic_is_a_backend_to_be_named_and_never_chosen() -> None:
    found = select("attend", spec("int4"), CPU, "cpu-fp32")
    assert found.backend == "cpu-fp32"
    assert registered("cpu-fp32") == registered("cpu")
    assert select("attend", spec("int4"), CPU).backend == "cpu"


@pytest.mark.parametrize(
    ("given", "meant"), [("trition", "triton"), ("CPU", "cpu"), ("ref", "reference"), ("atuo", "auto")]
)
def test_an_unknown_backend_is_refused_with_the_nearest(given: str, meant: str) -> None:
    for refuse in (check_backend, lambda name: select("attend", spec("int4"), CPU, name)):
        with pytest.raises(
            ConfigError, match=rf"unknown backend '{given}'; did you mean '{meant}'\? allowed: auto"
        ):
            refuse(given)


def test_known_backends_pass_and_a_wild_name_still_reads_as_a_sentence() -> None:
    for name in ("auto", *BACKENDS):
        check_backend(name)
    with pytest.raises(ConfigError, match="unknown backend '@@@'; allowed: auto, triton, cpu, reference"):
        check_backend("@@@")


def test_a_torch_device_is_described_by_its_type() -> None:
    assert Device.of(torch.device("cpu")) == CPU


def test_an_nvidia_gpu_is_described_by_name_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert Device.of(torch.device("cuda:0")) == OLD_GPUS[1]
    assert Device.of(torch.device("cuda:0")).architecture == "sm75"


def test_an_amd_gpu_is_described_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm calls it a cuda device and gives it numbers that look like a compute capability."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    facts = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    found = Device.of(torch.device("cuda:0"))
    assert found == MI300X
    assert found.architecture == "gfx942"
    assert not found.multiplies_e4m3fn, "its FP8 is another one"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_triton_runs_on_amd_gpus_that_it_is_compiled_for(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "_has_triton", lambda: True)
    assert select(operation, spec("int4"), MI300X).backend == "triton"
    old = Device(type="cuda", name="AMD Instinct MI50", gfx="gfx906")
    with pytest.raises(UnsupportedKernel, match=r"not compiled for gfx906 \(AMD Instinct MI50\); .*gfx942"):
        select(operation, spec("int4"), old, "triton")


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_gpus_are_refused_by_name(kind: str) -> None:
    device = Device.of(torch.device(kind))
    with pytest.raises(UnsupportedKernel, match=f"needs an NVIDIA or AMD GPU, not {kind}"):
        select("attend", spec("int4"), device, "triton")
    assert select("attend", spec("int4"), device).backend == "reference"
