"""Compare kvq's AWQ tensors with those that AutoAWQ packs from the same weights, word by word.

    python tools/check_autoawq.py write words.safetensors          # where kvq is installed
    python3.11 -m venv awq && awq/bin/pip install torch==2.13.0 safetensors numpy
    awq/bin/pip install --no-deps autoawq==0.2.9
    awq/bin/python tools/check_autoawq.py compare words.safetensors

AutoAWQ is no longer maintained and its `__init__` imports models that current transformers lacks, so it
lives in an environment of its own, and only its packing is imported: `WQLinear_GEMM.from_linear` and
`dequantize_gemm`. The file holds, for each case, kvq's tensors, and beside them the plain weight, scales and
zero points in fp32 that AutoAWQ starts from.
"""

import argparse
import importlib.util
import sys
import types
from pathlib import Path

import torch
from torch import Tensor

CASES = [  # inputs, outputs (from_linear needs whole 32), group size (0: the whole row), zero points
    (128, 32, 32, True),
    (384, 96, 128, True),
    (96, 64, 0, True),
    (256, 160, 64, False),
]


def write(path: Path) -> None:
    """Pack random weights with kvq."""
    from safetensors.torch import save_file

    from kvq.formats.weights import WeightCode, WeightFormat
    from kvq.weights import round_weight
    from kvq.weights.files import pack_linear

    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for i, (inputs, outputs, group, asymmetric) in enumerate(CASES):
        fmt = WeightFormat(code=WeightCode.INT4, group_size=group or None, symmetric=not asymmetric)
        weight = round_weight(torch.randn(outputs, inputs) + 0.2, fmt, dtype=torch.float16)
        tensors |= pack_linear("autoawq", f"{i}", weight)
        zero = torch.zeros(weight.scale.shape) if weight.zero is None else weight.zero.float()
        q = weight.integers().float().unflatten(1, (weight.scale.shape[1], -1))
        plain = (q - zero[:, :, None]) * weight.scale.float()[:, :, None]
        tensors[f"{i}.plain"] = plain.flatten(1)  # [out, in]
        tensors[f"{i}.plain_scales"] = weight.scale.float().T.contiguous()  # [groups, out]
        tensors[f"{i}.plain_zeros"] = (zero + 8).T.contiguous()  # [groups, out]
        tensors[f"{i}.dequantized"] = weight.dequantize()  # fp16 [out, in]
    save_file(tensors, path)


def compare(path: Path) -> None:
    """Pack them with AutoAWQ; exits with 1 if a word differs."""
    from safetensors.torch import load_file

    gemm, packing = _autoawq()
    tensors, wrong, words = load_file(path), 0, 0
    for i, (inputs, outputs, group, _) in enumerate(CASES):
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = tensors[f"{i}.plain"]
        size = group or inputs
        scales, zeros = tensors[f"{i}.plain_scales"], tensors[f"{i}.plain_zeros"]
        packed = gemm.WQLinear_GEMM.from_linear(linear, 4, size, scales=scales, zeros=zeros)
        for name in ("qweight", "qzeros", "scales"):
            own, theirs = tensors[f"{i}.{name}"], getattr(packed, name)
            same = own.dtype == theirs.dtype and torch.equal(own, theirs)
            wrong, words = wrong + (not same), words + own.numel()
            print(f"case {i} {name} {list(own.shape)}: {'equal' if same else 'DIFFERENT'}")
        parts = [tensors[f"{i}.{name}"] for name in ("qweight", "qzeros", "scales")]
        same = torch.equal(packing.dequantize_gemm(*parts, 4, size).T, tensors[f"{i}.dequantized"])
        wrong += not same
        print(f"case {i} dequantized: {'equal' if same else 'DIFFERENT'}")
    print(f"{words} words and scales compared, {wrong} tensors differ")
    sys.exit(1 if wrong else 0)


def _autoawq() -> tuple[types.ModuleType, types.ModuleType]:
    """AutoAWQ's two modules, without the `__init__` of the packages they lie in."""
    spec = importlib.util.find_spec("awq")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("AutoAWQ is not installed here; see this script's docstring")
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    sys.modules.setdefault("accelerate", types.ModuleType("accelerate"))  # imported, not used in packing
    gemm = importlib.import_module("awq.modules.linear.gemm")
    return gemm, importlib.import_module("awq.utils.packing_utils")


def main() -> None:
    """Write or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    (write if arguments.action == "write" else compare)(arguments.file)


if __name__ == "__main__":
    main()
