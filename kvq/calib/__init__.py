"""Calibration: what K and V of a model look like, observed through its attention."""

from kvq.calib.observe import Observations, calibrate, observe

__all__ = ["Observations", "calibrate", "observe"]
