"""Where the time of routing attention and of attention to chosen blocks goes on a GPU, kernel by
kernel: PyTorch's profiler over the operators of libbirkhoff_ops.so (docs/pytorch.md), whose
backward pass runs the forward pass again. Prints a table in Markdown for each.

    python tests/bench/gpu_trace.py --library PACKAGE/lib/libbirkhoff_ops.so
"""

import argparse
import collections
import pathlib
import re

import torch
from torch.profiler import ProfilerActivity, profile

CALLS = 5


def routing(a, selection):
    q, k, v = (torch.randn(a.batch,
                           a.heads,
                           a.length,
                           a.head_dim,
                           device="cuda",
                           dtype=torch.bfloat16,
                           requires_grad=True) for _ in range(3))
    centroids = torch.nn.functional.normalize(torch.randn(a.heads,
                                                          a.length // a.window,
                                                          a.head_dim,
                                                          device="cuda"),
                                              dim=-1)
    return (
        q, k,
        v), lambda: torch.ops.birkhoff.routing_attention(q, k, v, centroids, a.window, selection)[0]


def chosen_blocks(a):
    q, k, v = (torch.randn(a.batch,
                           a.heads,
                           a.length,
                           a.head_dim,
                           device="cuda",
                           dtype=torch.bfloat16,
                           requires_grad=True) for _ in range(3))

    def attend():
        chosen = torch.ops.birkhoff.select_top_blocks(q, k, a.block, a.chosen)
        return torch.ops.birkhoff.listed_block_attention(q, k, v, chosen, a.block)

    return (q, k, v), attend


def kernels(work):
    """{name: (calls, microseconds)} of one call of work()."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(CALLS):
            work()
        torch.cuda.synchronize()
    times = collections.defaultdict(lambda: [0, 0.0])
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            entry = times[re.sub(r"\(anonymous namespace\)::|birkhoff::", "", event.name)[:110]]
            entry[0] += 1 / CALLS
            entry[1] += event.device_time_total / CALLS
    return times


def show(name, times):
    print(
        f"\n{name}: {sum(time for _, time in times.values()):.0f} us\n\n| kernel | calls | us "
        "|\n|---|---:|---:|"
    )
    for kernel, (calls, time) in sorted(times.items(), key=lambda each: -each[1][1])[:25]:
        print(f"| `{kernel}` | {calls:.0f} | {time:.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path, required=True)
    for name, default in dict(batch=4,
                              heads=16,
                              length=4096,
                              head_dim=64,
                              window=256,
                              block=128,
                              chosen=3).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    a = parser.parse_args()
    torch.ops.load_library(a.library.resolve())
    torch.manual_seed(1)
    for name, (leaves, forward) in {
            "routing, causal_bucket": routing(a, "causal_bucket"),
            "routing, full_topw": routing(a, "full_topw"),
            "chosen blocks": chosen_blocks(a)
    }.items():
        d_out = torch.randn_like(leaves[0])
        show(f"{name}, forward", kernels(lambda: forward().detach()))
        show(f"{name}, forward and backward",
             kernels(lambda: torch.autograd.grad(forward(), leaves, d_out)))


if __name__ == "__main__":
    main()
