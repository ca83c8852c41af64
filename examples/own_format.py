"""Your own KV format: registered, then measured by any of kvq's commands, beside kvq's formats.

python examples/own_format.py                                         the table below
python examples/own_format.py eval --kv fp32,int4,my-int4 --tasks perplexity,kl,generation
"""

import sys

import kvq
from kvq.cli import main


def quantize(x):  # fp32 [rows, head_dim]: rows of K or V, as attention reads them
    scale = (x.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-6)
    return (x / scale).round().int(), scale.half()


def dequantize(codes, scale):
    return codes * scale.float()


def by_channel(x):  # fp32 [blocks, 32 tokens, head_dim]: what is read back, in one function
    scale = (x.abs().amax(-2, keepdim=True) / 7).clamp(min=1e-6)
    return (x / scale).round() * scale


kvq.register_format("my-int4", quantize, dequantize, bits=4 + 16 / 64)
kvq.register_format("my-channels", by_channel, bits=4 + 16 / 32, block=32)

if __name__ == "__main__":
    main(
        sys.argv[1:] or ["perplexity", "--kv", "fp32,int4,my-int4,my-channels/my-int4", "--max-windows", "2"]
    )
