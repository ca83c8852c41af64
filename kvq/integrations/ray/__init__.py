"""Replicas of kvq's server behind Ray Serve's routers, with Ray's autoscaling and rolling updates.

    from ray import serve
    from kvq.integrations.ray import application

    serve.run(application("./my-llama", kv="int4", num_replicas=4, router="affinity"))

Alternatively, use `serve run kvq.integrations.ray:build model=./my-llama kv=int4 num_replicas=4`. An ingress
forwards requests to the replicas. Each replica is the application of `kvq serve` with a separate engine.
Importing this module does not import Ray; using it without Ray raises an error on how to install Ray.
"""

from typing import TYPE_CHECKING

from kvq.lazy import lazily

if TYPE_CHECKING:
    from kvq.integrations.ray.app import application, build
    from kvq.integrations.ray.fleet import Fleet
else:
    __getattr__ = lazily(
        __name__,
        {"kvq.integrations.ray.app": ("application", "build"), "kvq.integrations.ray.fleet": ("Fleet",)},
    )

__all__ = ["Fleet", "application", "build"]
