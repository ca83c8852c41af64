"""Kernels over quantized blocks: one folder per operation, each with a PyTorch reference."""

from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.paged import PagedKV, PagedRows, SequenceBatch, StagedBatch, StagedKV
from kvq.kernels.registry import BACKENDS, check_backend, register, registered, select
from kvq.kernels.spec import Device, Kernel, KernelSpec, LinearSpec, Support
from kvq.kernels.weight import BlockWeight, PlainWeight, QuantizedWeight, Weight

__all__ = [
    "BACKENDS", "AttentionOptions", "BlockWeight", "Device", "Kernel", "KernelSpec", "LinearSpec", "PagedKV",
    "PagedRows", "PlainWeight", "QuantizedWeight", "SequenceBatch", "StagedBatch", "StagedKV", "Support",
    "Weight", "check_backend", "register", "registered", "select",
]  # fmt: skip
