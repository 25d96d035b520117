"""What a call of an operator (libbirkhoff_ops.so, docs/pytorch.md) costs the host: forward and
backward of block_local_attention on a tensor so small that no kernel takes time, next to PyTorch's
scaled_dot_product_attention. Interleaved rounds, medians; on a GPU the host's time alone, up to the
last launch. The target is SDPA's own cost.

    python tests/bench/operator_cost.py --library build/cpu/libbirkhoff_ops.so
"""

import argparse
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

CALLS = 50  # of a round


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=200)
    a = parser.parse_args()
    torch.ops.load_library(a.library)
    torch.set_num_threads(1)
    options = {"device": a.device, "dtype": getattr(torch, a.dtype)}
    q, k, v = (torch.randn(1, 1, 16, 8, **options).requires_grad_() for _ in range(3))
    d_out = torch.randn(1, 1, 16, 8, **options)
    calls = {
        "block_local_attention": lambda: torch.ops.birkhoff.block_local_attention(q, k, v, 16),
        "scaled_dot_product_attention":
            lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    times = {name: [] for name in calls}
    for _ in range(a.rounds + 5):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                torch.autograd.grad(call(), (q, k, v), d_out)
            times[name].append((time.perf_counter() - start) / CALLS)
            if a.device != "cpu":
                torch.cuda.synchronize()
    medians = {name: 1e6 * statistics.median(each[5:]) for name, each in times.items()}
    print("| operator, forward + backward | us a call | / SDPA's |\n|---|---:|---:|")
    for name, median in medians.items():
        print(f"| {name} | {median:.1f} | "
              f"{median / medians['scaled_dot_product_attention']:.2f} |")


if __name__ == "__main__":
    main()
