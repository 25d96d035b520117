"""Compares Birkhoff's operators (libbirkhoff_ops.so, docs/pytorch.md) with what a user of PyTorch
would otherwise run, in one process on the same tensors:

- block-local attention, causal: FlexAttention compiled with a block mask,
scaled_dot_product_attention with the same mask, and dense causal;
- Sinkhorn attention, not causal: the same formula in eager PyTorch, that formula compiled
(inductor), the attention of PyPI's
  sinkhorn_transformer with its own Sinkhorn iterations, and dense attention. Keys equal values,
  because that package sorts keys where it should sort values (0.11.4, SinkhornAttention.forward);
  its causal path is another function and is measured in tests/bench/sinkhorn_speed.py.

Each result and its gradients are checked against one reference in fp64 before anything is timed
(except dense attention, which is another function). Interleaved rounds, medians; on a GPU the L2
cache is flushed before each. Prints a table in Markdown.

    python tests/bench/attention_peers.py --library build/cpu/libbirkhoff_ops.so
"""

import argparse
import math
import pathlib
import statistics
import sys
import time

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

ROOT = pathlib.Path(__file__).resolve().parents[2]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# Relative to the reference's largest number. PyTorch's own kernels keep these bounds, too.
BOUNDS = {"fp32": 2e-4, "bf16": 0.05, "fp64": 1e-10}


def sinkhorn(scores, iterations):
    for _ in range(iterations):
        scores = scores - scores.logsumexp(-2, keepdim=True)
        scores = scores - scores.logsumexp(-1, keepdim=True)
    return scores.exp()


def sinkhorn_attention(q, k, scores, block, iterations):
    weights = sinkhorn(scores, iterations).to(q.dtype)
    q, k = (x.unflatten(2, (-1, block)) for x in (q, k))
    keys = torch.cat([(weights @ k.flatten(3)).view_as(k), k], 3)
    return ((q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ keys).flatten(2, 3)


def pypi_attention(a):
    """The attention of sinkhorn_transformer, with given scores instead of those of its sort net."""
    from sinkhorn_transformer import sinkhorn_transformer as package

    module = package.SinkhornAttention(a.block, a.heads * a.head_dim, a.head_dim, a.heads,
                                       max(a.lengths))

    class Scores(torch.nn.Module):
        def forward(self, q, k, topk):
            # The package normalizes rows, then columns; ours ends with rows.
            return package.sinkhorn_sorting_operator(
                self.scores.flatten(0, 1).transpose(1, 2), a.iterations).transpose(1, 2)

    module.sort_net = Scores()

    def attend(q, k, scores):
        module.sort_net.scores = scores
        return module(q, k, k)

    return attend


def block_local(a, length):
    """(problem's name, inputs, reference, {name: (function, comparable, has a backward pass)})"""
    make = lambda: torch.randn(a.batch, length, a.heads, a.head_dim, device=a.device).to(DTYPES[
        a.dtype]).transpose(1, 2)
    inputs = [make(), make(), make()]
    token = torch.arange(length, device=a.device)
    seen = (token[:, None] // a.block == token[None, :] // a.block) & (token[None, :]
                                                                       <= token[:, None])
    peers = {
        "birkhoff": (lambda q, k, v: torch.ops.birkhoff.block_local_attention(q, k, v, a.block),
                     True, True),
        "masked SDPA": (lambda q, k, v: scaled_dot_product_attention(q, k, v, seen), True, True),
        "dense causal SDPA":
            (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), False, True),
    }
    if not a.no_compile:
        mask = create_block_mask(lambda b, h, i, j: (i // a.block == j // a.block) & (j <= i),
                                 None,
                                 None,
                                 length,
                                 length,
                                 device=a.device,
                                 BLOCK_SIZE=max(a.block, 128 if a.device == "cuda" else 1))
        flex = torch.compile(flex_attention, dynamic=False)
        # On the CPU it has no backward pass (PyTorch 2.11).
        peers["FlexAttention, compiled"] = (lambda q, k, v: flex(q, k, v, block_mask=mask), True,
                                            a.device == "cuda")
    exact = lambda q, k, v: scaled_dot_product_attention(q, k, v, seen.cpu())
    return f"block-local, b = {a.block}, causal", inputs, exact, peers


def sorted_blocks(a, length):
    make = lambda: torch.randn(a.batch, length, a.heads, a.head_dim, device=a.device).to(DTYPES[
        a.dtype]).transpose(1, 2)
    N = length // a.block
    scores_type = torch.float64 if a.dtype == "fp64" else torch.float32
    inputs = [
        make(),
        make(),
        torch.randn(a.batch, a.heads, N, N, dtype=scores_type, device=a.device)
    ]
    formula = lambda q, k, s: sinkhorn_attention(q, k, s, a.block, a.iterations)
    peers = {
        "birkhoff": (lambda q, k, s: torch.ops.birkhoff.sinkhorn_attention(
            q, k, k, s, a.block, "full", a.iterations), True, True),
        "the formula, eager": (formula, True, True),
        "dense SDPA": (lambda q, k, s: scaled_dot_product_attention(q, k, k), False, True),
    }
    if not a.no_compile:
        peers["the formula, compiled"] = (torch.compile(formula, dynamic=False), True, True)
    try:
        peers["sinkhorn_transformer (PyPI)"] = (pypi_attention(a), True, True)
    except ImportError as error:
        print(f"Left out: sinkhorn_transformer: {error}", file=sys.stderr)
    return f"Sinkhorn, b = {a.block}, {a.iterations} iterations", inputs, formula, peers


def solve(function, inputs, d_out, backward=True):
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    with torch.set_grad_enabled(backward):
        out = function(*leaves)
    if not backward:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out, allow_unused=True)]


def error(results, exact):
    """The largest error, each relative to its tensor's largest number."""
    worst = 0.0
    for result, true in zip(results, exact):
        worst = max(worst, ((result.detach().double().cpu() - true).abs().max() /
                            true.abs().max()).nan_to_num(math.inf).item())
    return worst


class Watch:
    def __init__(self, device):
        self.flush = torch.empty(256 << 20, dtype=torch.uint8,
                                 device=device) if device == "cuda" else None

    def seconds(self, work):
        if self.flush is None:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.flush.fill_(1)
        before.record()
        work()
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after) / 1e3


def compare(a, watch, name, inputs, reference, peers):
    d_out = torch.randn(inputs[0].shape[0],
                        inputs[0].shape[2],
                        inputs[0].shape[1],
                        inputs[0].shape[3],
                        device=a.device)
    d_out = d_out.to(inputs[0].dtype).transpose(1, 2)
    # Sequences are independent, so checking one is enough.
    first = lambda x: x[:1].detach()
    exact = solve(reference, [first(x).double().cpu() for x in inputs], first(d_out).double().cpu())
    errors, left = {}, {}
    for peer, (function, comparable, backward) in peers.items():
        try:
            # The call is the one that will be timed, so that graphs are compiled only once.
            results = solve(function, inputs, d_out, backward)
        except Exception as problem:
            if peer == "birkhoff":
                raise
            print(f"Left out: {peer}: {str(problem).splitlines()[0]}", file=sys.stderr)
            continue
        left[peer] = (function, backward)
        if comparable:
            errors[peer] = error([first(x) for x in results], exact)
            if not errors[peer] <= BOUNDS[a.dtype]:
                sys.exit(
                    f"{peer}: relative error {errors[peer]:.1e} against fp64, more than "
                    f"{BOUNDS[a.dtype]:.1e}: not measured"
                )
    times = {peer: ([], []) for peer in left}
    for round in range(-3, a.rounds):
        for peer, (function, backward) in left.items():
            forward = watch.seconds(lambda: solve(function, inputs, d_out, False))
            both = watch.seconds(lambda: solve(function, inputs, d_out)) if backward else math.nan
            if round >= 0:
                times[peer][0].append(forward)
                times[peer][1].append(both)
    ours = [statistics.median(x) for x in times["birkhoff"]]
    for peer, values in times.items():
        forward, both = (statistics.median(x) * 1e3 for x in values)
        cells = [name, inputs[0].shape[2], peer, f"{forward:.4g}", f"{forward / ours[0] / 1e3:.3g}"]
        cells += ["", ""] if math.isnan(both) else [f"{both:.4g}", f"{both / ours[1] / 1e3:.3g}"]
        print("| " +
              " | ".join(map(str, cells + [f"{errors[peer]:.1e}" if peer in errors else ""])) +
              " |",
              flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library",
                        type=pathlib.Path,
                        default=ROOT / "build/cpu/libbirkhoff_ops.so")
    parser.add_argument("--lengths",
                        type=lambda text: [int(x) for x in text.split(",")],
                        default=[1024])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-compile",
                        action="store_true",
                        help="leave out the candidates that need torch.compile")
    a = parser.parse_args()
    if any(length % a.block for length in a.lengths):
        parser.error("--lengths must be multiples of --block: the peers support no others")
    torch.ops.load_library(a.library.resolve())
    torch.manual_seed(1)
    watch = Watch(a.device)
    where = torch.cuda.get_device_name(
    ) if a.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"PyTorch {torch.__version__}, {where}; B = {a.batch}, H = {a.heads}, D = {a.head_dim}, "
        f"{a.dtype}; medians of {a.rounds} rounds: "
        f"`python tests/bench/attention_peers.py {' '.join(sys.argv[1:])}`\n")
    print(
        "| mechanism | L | by | forward, ms | / birkhoff | forward + backward, ms | / birkhoff | "
        "error |\n|---|---:|---|---:|---:|---:|---:|---:|"
    )
    for length in a.lengths:
        for problem in (block_local, sorted_blocks):
            compare(a, watch, *problem(a, length))


if __name__ == "__main__":
    main()
