"""Options shared by benchmarks: loads, and kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import click

from kvq.commands.shared.declare import option, picked
from kvq.commands.shared.param_types import Finite
from kvq.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvq.bench.engine.load import Load


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficOptions:
    """Options for the lengths and arrivals of a load's requests."""

    input_len: str = option("128", "Tokens of each prompt: 128, 16:512 (uniform), or lognormal:MEDIAN:SIGMA.")
    output_len: str = option("64", "Tokens of each output, in the same notation.")
    rate: str = option("inf", "Requests per second, with random gaps.")
    shared_prefix: float = option(0.0, "Share of each prompt that all have in common.", type=Finite(0, 1))
    seed: int = option(0, "Seed of lengths, arrivals and token ids.")

    def make(self, num_requests: int, concurrency: object) -> "Callable[..., Load]":
        """Return a function that builds the load from a model's limits; `concurrency` excludes a rate.

        Raises:
            ConfigError: an option is invalid, or both a rate and a concurrency are given.
        """
        from kvq.bench.engine.load import Load
        from kvq.capacity.lengths import parse_lengths

        if concurrency is not None and self.rate != "inf":
            raise ConfigError("--rate and --concurrency both say when requests come; give one of them")
        try:
            per_second = float(self.rate)
        except ValueError as error:
            raise ConfigError(f"--rate takes requests per second or inf, got {self.rate!r}") from error
        return partial(
            Load,
            num_requests=num_requests,
            input_lengths=parse_lengths(self.input_len, "--input-len"),
            output_lengths=parse_lengths(self.output_len, "--output-len"),
            rate=per_second,
            **picked(self, "shared_prefix", "seed"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelOptions:
    """Options for the device, backend and dtype of kernels, and for the number of timings."""

    device: str = option("auto", "auto, cpu, cuda or cuda:N.")
    backend: str = option(
        "auto", "auto, triton, triton-8bit (8-bit products), cpu, cpu-fp32 (attention in fp32) or reference."
    )
    dtype: str = option("auto", "Type of the inputs, such as Q: auto, fp32, bf16, fp16.")
    repeats: int = option(20, type=click.IntRange(1, 10_000))
    seed: int = option(0)

    def place(self) -> "tuple[torch.device, torch.dtype]":
        """Return the device and the dtype of inputs.

        Raises:
            ConfigError: the name of the device or dtype is unknown.
        """
        import torch

        from kvq.models.parts.device import DTYPES, pick_device

        device = pick_device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # graphs and events belong to the current device
        dtype = ("bf16" if device.type == "cuda" else "fp32") if self.dtype == "auto" else self.dtype
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
        return device, DTYPES[dtype]


def split_list(text: str, option: str) -> list[str]:
    """Split a text at commas, and return the values.

    Raises:
        ConfigError: the text contains no values.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option} takes values with commas between, got none")
    return names
