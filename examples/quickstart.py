"""Ask a module the four questions in Python: forward, weights, gradients and complexity.

Needs a running service (``attention serve``, or ATTENTION_URL): ``python examples/quickstart.py``
"""

import numpy as np

from attention_client import Client

tokens = np.random.default_rng(0).normal(size=(1, 5, 64)).astype(np.float32)  # [batch, tokens, d_model]
config = {"d_model": 64, "num_heads": 4, "spec": {"masks": [{"name": "causal"}]}}

with Client() as client:
    module = client.modules.create("quickstart", config, seed=0)
    print(f"{module.name}: {module.parameter_count} parameters on {module.device}, version {module.version[:8]}")

    reply = client.forward("quickstart", tokens, return_=["output", "weights"])
    print(f"\noutput {reply.output.shape} by the {reply.ran.kernel} kernel in {reply.ran.compute_ms:.2f} ms")
    print("weights of head 0:", reply.weights[0, 0].round(2), sep="\n")

    looks = client.weights("quickstart", tokens, top_k=1)
    print("\nentropy of each head:", looks.statistics.entropy[0].round(2))
    print("most attended key of each query in head 0:", looks.top.keys[0, 0, :, 0])

    changes = client.gradients("quickstart", tokens, wrt=["query", "weights", "parameters"], check=True)
    print("\ngradients, and how far they are from central differences:")
    for name, gradient in changes.gradients.items():
        check = changes.check[name]
        print(
            f"  {name:<14} {gradient.shape!s:<16} {check.max_absolute_error:.0e}",
            "passed" if check.passed else "FAILED",
        )

    cost = client.complexity("quickstart", 512, [512, 1024, 2048])
    print(f"\ntime grows as {cost.growth.time_order}, memory as {cost.growth.memory_order}")
    for one in cost.costs:
        print(f"  {one.shape.queries} tokens: {one.forward.masked.total:,} FLOPs, about {one.predicted_ms:.1f} ms")
