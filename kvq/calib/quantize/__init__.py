"""Weight quantization of a model: layers, methods, samples, and the output folder."""

from kvq.calib.quantize.layer import ModuleReport
from kvq.calib.quantize.run import Quantized, quantize_model
from kvq.calib.quantize.settings import QuantizeSettings, Quantizing

__all__ = ["ModuleReport", "QuantizeSettings", "Quantized", "Quantizing", "quantize_model"]
