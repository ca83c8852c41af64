"""Where a quantized checkpoint comes from and goes to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvq.calib.quantize.driver import Progress
from kvq.errors import ConfigError
from kvq.evals import EvalText
from kvq.models.prepared import PreparedModel, prepare
from kvq.models.resolve import ModelSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizing:
    """Where a quantized checkpoint comes from and goes to."""

    model: str | Path | ModelSource | PreparedModel
    out: Path
    file_format: str = "compressed-tensors"
    text: EvalText | None = None  # None: CPython's help topics
    device: str = "auto"
    dtype: str = "auto"
    kv_scales: bool = False
    overwrite: bool = False
    restart: bool = False
    revision: str | None = None
    token: str | None = None
    progress: Callable[[str], Progress] = field(default=lambda what: lambda done, total: None)
    on_resumed: Callable[[int], object] = field(default=lambda layers: None)  # told how many are finished

    def stored_dtype(self) -> str:
        """The dtype of scales and of what stays unquantized; GPTQ's and AWQ's is fp16.

        Raises:
            ConfigError: another was asked for where the file format has fp16 alone.
        """
        if self.file_format == "compressed-tensors":
            return self.dtype
        if self.dtype not in ("auto", "fp16"):
            raise ConfigError(
                f"{self.file_format} keeps fp16, got dtype {self.dtype!r}; leave --dtype out, or write "
                f"compressed-tensors"
            )
        return "fp16"

    def prepared(self) -> PreparedModel:
        """The model, checked; none of its weights are read.

        Raises:
            ModelError: missing, damaged or refused model.
        """
        if isinstance(self.model, PreparedModel):
            return self.model
        return prepare(
            self.model,
            device=self.device,
            max_context=1,  # of no consequence: nothing is served
            revision=self.revision,
            token=self.token,
        )
