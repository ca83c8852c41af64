"""Which devices and shapes the compiled kernels take; they know every format."""

from kvq.kernels.native.library import load
from kvq.kernels.spec import Device, KernelSpec, LinearSpec, Support

MOST_DIM = 4096  # elements of a token row that write_kv.cpp has room for


def supports(spec: KernelSpec, device: Device) -> Support:
    """Yes for memory of a CPU, if the library is there."""
    runs = supports_linear(spec, device)
    if runs.yes and max(spec.formats.k_head_dim, spec.formats.v_head_dim) > MOST_DIM:
        return Support(False, f"takes head dimensions up to {MOST_DIM}")
    return runs


def supports_linear(spec: KernelSpec | LinearSpec, device: Device) -> Support:
    """The same; every format and shape."""
    if device.type != "cpu":
        return Support(False, f"works on CPU memory, not on {device.name}", is_missed=False)
    library = load()
    return Support(False, library) if isinstance(library, str) else Support(True)
