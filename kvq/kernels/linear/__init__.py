"""What the Linear kernels share: the quantized weight, and what one is asked to support."""
