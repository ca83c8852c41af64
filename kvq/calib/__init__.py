"""Calibration: statistics of a model's K and V, observed through its attention."""

from kvq.calib.observe import Observations, calibrate, observe

__all__ = ["Observations", "calibrate", "observe"]
