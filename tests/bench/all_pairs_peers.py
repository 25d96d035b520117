"""Compares Birkhoff's operators of attention over all pairs (libbirkhoff_ops.so, docs/pytorch.md)
with what a user of PyTorch would otherwise run, in one process on the same tensors:

- top-k attention, causal: torch.topk with a masked softmax, and with gathered values;
- entmax attention, causal: PyPI's entmax (entmax15, sparsemax, and entmax_bisect with exponents
  that learn);
- Sinkformer attention: the formula in eager PyTorch as its published code computes it, with all
  scores in memory, in the log domain;
- Sinkhorn's algorithm: ot.sinkhorn of PyPI's POT, plain and in the log domain;

and with our dense attention, which is another function. Every other peer is first checked against
ours in fp64: results within 1e-6 and gradients within 1e-5 of the largest element, and transports
at convergence within 1e-8. Then interleaved rounds, medians. The floor is the time of the products
that every implementation needs, at the speed of torch.matmul. A bar is a target for our own kernel.

    build/peers/bin/pip install entmax==1.3 POT==0.9.7.post1   # README.md makes build/peers
    build/peers/bin/python tests/bench/all_pairs_peers.py --library build/cpu/libbirkhoff_ops.so
"""

import argparse
import math
import pathlib
import statistics
import sys

import torch

import birkhoff_runs as runs
from attention_peers import ROOT, Watch, error, solve

THREADS = 2


def causal_scores(q, k):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


def masked_top_k(q, k, v, count):
    scores = causal_scores(q, k)
    least = scores.topk(min(count, scores.shape[-1])).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf).softmax(-1) @ v


def gathered_top_k(q, k, v, count):
    scores, index = causal_scores(q, k).topk(min(count, k.shape[2]))
    head = torch.arange(v.shape[0] * v.shape[1]).view(*v.shape[:2], 1, 1)
    return (scores.softmax(-1)[..., None] * v.flatten(0, 1)[head, index]).sum(-2)


def sinkformer(q, k, v, half_steps):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    f, g = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[..., :1, :])
    for t in range(half_steps):
        if t % 2 == 0:
            f = f - (scores + f + g).logsumexp(-1, keepdim=True)
        else:
            g = g - (scores + f + g).logsumexp(-2, keepdim=True)
    return (scores + f + g).exp() @ v


def pot(scores, iterations, method):
    """N times the transports with uniform marginals; POT takes one matrix at a time."""
    import ot

    N = scores.shape[-1]
    mass = torch.full((N,), 1 / N, dtype=scores.dtype)
    plans = [
        ot.sinkhorn(mass, mass, -x, 1.0, method, numItermax=iterations, stopThr=0, warn=False)
        for x in scores.flatten(0, 1)
    ]
    return N * torch.stack(plans).view_as(scores)


class Problem:
    """ours and peers: {name: function of the inputs}, ours first. other: functions that compute
    something else. products: multiply-adds of one head that every implementation needs, forward and
    forward + backward. bars: {(peer, length): (forward, forward + backward)}, least ratios of the
    peer's time to ours. fp64: the bounds of results and gradients."""
    def __init__(self, name, inputs, peers, products, other=None, bars=None, fp64=(1e-6, 1e-5)):
        self.name, self.inputs, self.peers, self.products = name, inputs, peers, products
        self.other, self.bars, self.fp64 = other or {}, bars or {}, fp64
        self.ours = next(iter(peers))

    def check(self):
        """Of one head, in fp64."""
        inputs = [
            x[:1, :1].double() if x.dim() == 4 else x[:1].double() for x in self.inputs
        ]
        d_out = torch.randn_like(self.peers[self.ours](*inputs))
        exact = solve(self.peers[self.ours], inputs, d_out)
        for peer, function in self.peers.items():
            results = solve(function, inputs, d_out)
            for what, bound, part in (("result", self.fp64[0], slice(1)),
                                      ("gradients", self.fp64[1], slice(1, None))):
                worst = error(results[part], exact[part])
                if not worst <= bound:
                    sys.exit(
                        f"{self.name}, {peer}: {what} differ by {worst:.1e} from ours, more than "
                        f"{bound:.0e}: not measured")


def attention_problems(a, length):
    import entmax

    ops = torch.ops.birkhoff
    make = lambda: torch.randn(a.batch, length, a.heads, a.head_dim).transpose(1, 2)
    q, k, v = make(), make(), make()
    alpha = torch.linspace(1.25, 1.75, a.heads)
    pairs, all_pairs, few = length * (length + 1) // 2, length**2, length * a.kept
    dense = {"our dense attention": lambda q, k, v, *_: ops.dense_attention(q, k, v)}
    yield Problem(
        f"top-{a.kept}", [q, k, v], {
            "birkhoff": lambda q, k, v: ops.top_k_attention(q, k, v, a.kept),
            "topk, masked softmax": lambda q, k, v: masked_top_k(q, k, v, a.kept),
            "topk, gathered values": lambda q, k, v: gathered_top_k(q, k, v, a.kept)
        }, ((pairs + few) * a.head_dim, (pairs + 5 * few) * a.head_dim),
        dense,
        bars={
            ("our dense attention", 1024): (0.9, None),
            ("our dense attention", 4096): (1.2, 2.5)
        })
    scored = (pairs * a.head_dim,) * 2
    for name, ours, package in (("entmax-1.5", None, entmax.entmax15),
                                ("sparsemax", torch.tensor(2.0), entmax.sparsemax)):
        yield Problem(name, [q, k, v], {
            "birkhoff": lambda q, k, v, ours=ours: ops.entmax_attention(q, k, v, ours),
            "entmax (PyPI)":
                lambda q, k, v, package=package: package(causal_scores(q, k), dim=-1) @ v
        },
                      scored,
                      dense,
                      bars={("entmax (PyPI)", n): (5, 5)
                            for n in (1024, 4096)} if ours is None else {})
    yield Problem(
        "entmax, learned exponents", [q, k, v, alpha], {
            "birkhoff": lambda q, k, v, alpha: ops.entmax_attention(q, k, v, alpha),
            "entmax_bisect (PyPI)": lambda q, k, v, alpha: entmax.entmax_bisect(
                causal_scores(q, k), alpha[:, None, None], dim=-1) @ v
        }, scored, dense)
    yield Problem(f"Sinkformer, {a.half_steps} half-steps", [q, k, v], {
        "birkhoff": lambda q, k, v: ops.sinkformer_attention(q, k, v, a.half_steps),
        "the published code's way": lambda q, k, v: sinkformer(q, k, v, a.half_steps)
    }, (2 * all_pairs * a.head_dim, 6 * all_pairs * a.head_dim), {
        "our dense attention": lambda q, k, v: ops.dense_attention(q, k, v, False)
    },
                  bars={
                      ("our dense attention", 1024): (1 / 3.5, 1 / 3.5),
                      ("our dense attention", 4096): (1 / 3.5, 1 / 3.5),
                      ("the published code's way", 1024): (3, 3),
                      ("the published code's way", 4096): (2, 2)
                  })


def balance_problem(a, length):
    scores = torch.randn(a.batch, a.heads, length, length)
    peers = {
        "birkhoff":
            lambda x: torch.ops.birkhoff.sinkhorn_balance(x, a.iterations, "full"),
        "ot.sinkhorn (PyPI)":
            lambda x: pot(x, a.iterations, "sinkhorn"),
        "ot.sinkhorn, log domain (PyPI)":
            lambda x: pot(x, a.iterations, "sinkhorn_log")
    }
    return Problem(f"Sinkhorn's algorithm, {a.iterations} iterations", [scores], peers, (0, 0))


def check_transports(length=200, keys=120):
    """At convergence: POT's transports, our balance, and our Sinkformer of a rectangle."""
    import ot

    q, k = (torch.randn(1, 1, n, keys, dtype=torch.float64) for n in (length, keys))
    square = torch.randn(1, 1, length, length, dtype=torch.float64)
    rectangle = q @ k.mT / math.sqrt(keys)
    unit = torch.eye(keys, dtype=torch.float64)[None, None]
    ours = {
        "sinkhorn_balance":
            (torch.ops.birkhoff.sinkhorn_balance(square, 1000, "full"), square),
        "sinkformer_attention":
            (torch.ops.birkhoff.sinkformer_attention(q, k, unit, 999), rectangle)
    }
    for name, (plan, scores) in ours.items():
        n, m = scores.shape[-2:]
        masses = [torch.full((x,), 1 / x, dtype=torch.float64) for x in (n, m)]
        for method in ("sinkhorn", "sinkhorn_log"):
            other = ot.sinkhorn(*masses, -scores[0, 0], 1.0, method, numItermax=10000,
                                stopThr=1e-13, warn=False)
            worst = (plan[0, 0] / n - other).abs().max().item() * n
            if not worst <= 1e-8:
                sys.exit(f"{name} and ot.sinkhorn ({method}): transports differ by {worst:.1e}")
            print(f"{name}, {n} x {m}: weights differ from ot.sinkhorn's ({method}) by {worst:.1e}")


def measure(a, watch, problem, length, speed):
    heads = a.batch * a.heads
    functions = problem.peers | problem.other
    times = {peer: ([], []) for peer in functions}
    d_out = torch.randn_like(problem.inputs[0])
    for round in range(-1, a.rounds):
        for peer, function in functions.items():
            forward = watch.seconds(lambda: solve(function, problem.inputs, d_out, False))
            both = watch.seconds(lambda: solve(function, problem.inputs, d_out))
            if round >= 0:
                times[peer][0].append(forward)
                times[peer][1].append(both)
    ours = [statistics.median(x) for x in times[problem.ours]]
    rows = {peer: [statistics.median(x) for x in each] for peer, each in times.items()}
    if any(problem.products):
        rows["floor"] = [2 * heads * x / speed for x in problem.products]
    for peer, seconds in rows.items():
        cells = [problem.name, length, peer]
        for mine, other, bar in zip(ours, seconds, problem.bars.get((peer, length), (None, None))):
            ratio = other / mine
            met = "" if bar is None else f"{bar:.2g}: {'met' if ratio >= bar else 'missed'}"
            cells += [f"{other * 1e3:.4g}", f"{ratio:.3g}", met]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library",
                        type=pathlib.Path,
                        default=ROOT / "build/cpu/libbirkhoff_ops.so")
    parser.add_argument("--lengths",
                        type=lambda text: [int(x) for x in text.split(",")],
                        default=[1024, 4096])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--kept", type=int, default=8, help="keys of top-k")
    parser.add_argument("--half-steps", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="problems whose name contains this text")
    a = parser.parse_args()
    torch.ops.load_library(a.library.resolve())
    torch.set_num_threads(THREADS)
    torch.manual_seed(1)
    watch = Watch("cpu")
    check_transports()
    square = torch.randn(2048, 2048)
    speed = 2 * 2048**3 / min(watch.seconds(lambda: square @ square) for _ in range(10))
    print(
        f"\n{runs.title()}\n\nPyTorch {torch.__version__}, {THREADS} threads, torch.matmul "
        f"{speed / 1e9:.0f} GFLOP/s; B = {a.batch}, H = {a.heads}, D = {a.head_dim}, fp32; medians "
        f"of {a.rounds} rounds\n\n"
        "| problem | L | by | forward, ms | / birkhoff | bar | forward + backward, ms "
        "| / birkhoff | bar |\n|---|---:|---|---:|---:|---|---:|---:|---|")
    for length in a.lengths:
        for problem in (*attention_problems(a, length), balance_problem(a, length)):
            if a.only in problem.name:
                problem.check()
                measure(a, watch, problem, length, speed)


if __name__ == "__main__":
    main()
