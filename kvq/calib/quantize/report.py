"""What quantizing did, module by module."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleReport:
    """One Linear layer. Fields are the JSON keys of `kvq quantize --json`."""

    layer: int
    module: str  # its name in the model
    method: str
    format: str
    in_features: int
    out_features: int
    relative_error: float  # |(W - Q) X| / |W X| over the calibration tokens; without data |W - Q| / |W|
    error_of: str  # "outputs" or "weights"
    bytes_before: int
    bytes_after: int
    alpha: float | None  # of the scales on its inputs; None: it has none
    seconds: float
