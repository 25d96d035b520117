"""Ceilings of one GPU: matrix products by events on long recorded sequences (cold and sustained),
the products of a training step of configs/lmx_base_dense.txtpb, copy speed, the L2 cache by size,
and what a small dependent kernel costs in a graph. About ten seconds.

    python3 tests/bench/gpu_ceilings.py
"""

import statistics

import torch

ROUNDS = 7


def seconds(work, launches=1, recorded=True):
    """Median seconds of a launch of work(), recorded `launches` times in one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    if recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                work()
        replay = graph.replay
    else:

        def replay():
            for _ in range(launches):
                work()

    times = []
    for _ in range(ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / launches)
    return statistics.median(times[1:])


def matrix(rows, columns):
    return torch.randn(rows, columns, device="cuda").bfloat16()


def products():
    size = 8192
    a, b, flops = matrix(size, size), matrix(size, size), 2 * size**3
    print(
        f"| at::mm of {size}, one launch | {flops / seconds(lambda: a @ b) * 1e-12:.0f} TFLOP/s |"
    )
    print(
        f"| the same, 40 recorded launches | {flops / seconds(lambda: a @ b, 40) * 1e-12:.0f}"
        " TFLOP/s |",
        flush=True,
    )
    tokens, total_flops, total_seconds = 65536, 0, 0
    for rows, inner, times in (
        (1536, 512, 6),
        (512, 512, 6),
        (2048, 512, 6),
        (512, 2048, 6),
        (32000, 512, 1),
    ):
        x, w, d_y = matrix(tokens, inner), matrix(rows, inner), matrix(tokens, rows)
        for work in (lambda: x @ w.t(), lambda: d_y @ w, lambda: d_y.t() @ x):
            total_seconds += times * seconds(work, 10)
            total_flops += times * 2 * tokens * rows * inner
    print(
        f"| products of the step of 52 million parameters alone | {total_flops * 1e-12:.2f} TFLOP,"
        f" {total_seconds * 1e3:.1f} ms, {total_flops / total_seconds * 1e-12:.0f} TFLOP/s |",
        flush=True,
    )


def memory():
    x = torch.ones(1 << 28, device="cuda")
    y = torch.empty_like(x)
    # A kernel copies: a recorded copy_() is a copy node, which is a fifth slower on an H100.
    print(
        f"| copy of 1 GiB | {8 * x.numel() / seconds(lambda: torch.neg(x, out=y)) * 1e-12:.2f}"
        " TB/s |"
    )
    for megabytes in (8, 16, 24, 32, 40, 48, 64):
        half = megabytes << 17
        time = seconds(lambda: torch.neg(x[:half], out=y[:half]), 50)
        print(
            f"| copy inside {megabytes} MiB | {8 * half / time * 1e-12:.2f} TB/s, {time * 1e6:.2f}"
            " us |",
            flush=True,
        )
    small = torch.zeros(128, device="cuda")
    print(
        "| a small dependent kernel in a graph of 1,000 |"
        f" {seconds(lambda: small.add_(1), 1000) * 1e6:.2f} us |"
    )


torch.manual_seed(1)
print(f"| {torch.cuda.get_device_name()} | PyTorch {torch.__version__} |\n|---|---|")
memory()
products()
