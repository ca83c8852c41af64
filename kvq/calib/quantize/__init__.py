"""Quantizing a model's weights: which layers, by which method, on which samples; and the folder it makes."""

from kvq.calib.quantize.layer import ModuleReport
from kvq.calib.quantize.run import Quantized, quantize_model
from kvq.calib.quantize.settings import QuantizeSettings, Quantizing, WeightMethod

__all__ = ["ModuleReport", "QuantizeSettings", "Quantized", "Quantizing", "WeightMethod", "quantize_model"]
