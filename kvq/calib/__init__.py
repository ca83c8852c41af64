"""Calibration: what K and V of a model look like, observed through its attention."""

from kvq.calib.static_scales import calibrate

__all__ = ["calibrate"]
