"""Serve a model by two to four kvq replicas behind Ray's prefix router.

python examples/ray_kvq.py [MODEL [KV]]

Needs `pip install '.[ray]'` in a clone of kvq at every node. Clients find the OpenAI routes at
http://127.0.0.1:8000/v1. Replicas are added while more requests are at work than there are seats. In a
cluster that runs already, the same without Python: serve run kvq.integrations.ray:build num_replicas=2
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
