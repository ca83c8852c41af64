"""Suites of what kvq runs inside of, each in an environment of its own: by `make scale`, else not at all."""

from importlib.util import find_spec

_NEEDED = {"vllm": "vllm", "lmcache": "lmcache", "ray": "ray", "dynamo": "dynamo"}  # folder -> module
collect_ignore = [folder for folder, module in _NEEDED.items() if find_spec(module) is None]
