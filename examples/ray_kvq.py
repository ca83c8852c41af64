"""Serve a model with two to four kvq replicas behind Ray's prefix router.

python examples/ray_kvq.py [MODEL [KV]]

Run `pip install '.[ray]'` in a clone of kvq on every node. The OpenAI routes are at http://127.0.0.1:8000/v1.
Ray adds replicas while there are more running requests than seats. In a running cluster, you can do the same
without Python: serve run kvq.integrations.ray:build num_replicas=2
"""

import sys

from ray import serve

from kvq.integrations.ray import application

model, kv = [*sys.argv[1:], *["tiny", "int4"][len(sys.argv) - 1 :]]
app = application(
    model,
    kv,
    num_replicas=2,
    max_replicas=4,
    router="affinity",
    ray_actor_options={"num_cpus": 1},  # {"num_gpus": 1} on GPUs
    engine={"max_num_seqs": 32},
    grace_s=30.0,
)

if __name__ == "__main__":
    serve.run(app, blocking=True)
