"""Quantizing a model's weights: which layers, by which method, on which samples; and the folder it makes."""

from kvq.calib.quantize.layer import ModuleReport
from kvq.calib.quantize.run import Quantized, quantize_model
from kvq.calib.quantize.settings import Method, QuantizeSettings, Quantizing

__all__ = ["Method", "ModuleReport", "QuantizeSettings", "Quantized", "Quantizing", "quantize_model"]
