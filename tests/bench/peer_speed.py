"""What sinkhorn_speed.py, routing_speed.py and normalizer_speed.py share: training-step tokens/s of
our program and of a public PyTorch language model of the same size, interleaved in one run. The
peer runs with PyTorch's defaults and with what a user of PyTorch can switch on: oneDNN, the
matrix-product library that our program chooses by itself if it is faster (PyTorch uses it only if
products may be rounded to bf16), with two threads and with one; with --precision bf16 also
autocast.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import birkhoff_runs as runs

WARM_UP = 3  # steps that are not measured
VOCABULARY = 65


def parsed(**defaults):
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="of our runs")
    parser.add_argument("--steps", type=int, default=40, help=f"of which {WARM_UP} are warm-up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer",
                        nargs=2,
                        metavar=("HOW", "THREADS"),
                        help="(internal) run the peer in this process")
    a = parser.parse_args()
    if a.steps <= WARM_UP:
        parser.error(f"--steps {a.steps}: must be above {WARM_UP}, the number of warm-up steps")
    return a


def run_peer(a, make, loss_of):
    """Trains make(); loss_of(model, inputs, targets) is its loss. Runs in a separate process and
    prints the peer's tokens/s."""
    import torch

    how, threads = a.peer
    torch.set_num_threads(int(threads))
    torch.manual_seed(1)
    if how == "oneDNN":
        torch.set_float32_matmul_precision("medium")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast")
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(VOCABULARY, (a.batch, a.context + 1))
    times = []
    for _ in range(a.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = loss_of(model, tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - start)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        json.dumps({
            "tokens_per_second": a.batch * a.context / statistics.median(times[WARM_UP:]),
            "parameters": parameters
        }))


def token_loss(logits, targets):
    import torch.nn.functional as F

    return F.cross_entropy(logits.reshape(-1, VOCABULARY).float(), targets.reshape(-1))


def ours(a, corpus, config, mechanism, ranks, threads):
    rows = runs.train(runs.ROOT / config,
                      runs.WORK / "peer_speed_run", [
                          f"data.corpus={corpus}", f"data.sequence_length={a.context}",
                          f"train.global_batch={a.batch}", f"train.steps={a.steps}",
                          f"model.channels={a.channels}", f"model.layers={a.layers}",
                          f"model.heads={a.heads}", f"train.precision={a.precision}",
                          "metrics.every=1", "evaluate.sequences=1", "checkpoint.every=0",
                          "model.attention.0={group{mechanism{%s}}}" % mechanism
                      ],
                      ranks=ranks,
                      threads=threads)
    return runs.training_speed(rows, skip=WARM_UP)


def compare(a, package, config, mechanisms):
    """Prints tokens/s of the peer and of our mechanisms (name: text), one rank with two threads and
    two ranks with one."""
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    base_name = f"{package} (PyPI), 2 threads"
    names = {
        base_name: ("default", "2"),
        "the same, oneDNN": ("oneDNN", "2"),
        "the same, oneDNN, 1 thread": ("oneDNN", "1")
    }
    if a.precision == "bf16":
        names["the same, autocast"] = ("autocast", "2")
    peers = set(names)
    for name, text in mechanisms.items():
        names[f"{name}, 1 rank x 2 threads"] = (text, None, 2)
        names[f"{name}, 2 ranks x 1 thread"] = (text, 2, 1)
    figures = {name: [] for name in names}
    for _ in range(a.rounds):
        for name, setting in names.items():
            if name in peers:
                done = subprocess.run([sys.executable, *sys.argv, "--peer", *setting],
                                      capture_output=True,
                                      text=True,
                                      check=True)
                result = json.loads(done.stdout.strip().splitlines()[-1])
                figures[name].append(result["tokens_per_second"])
            else:
                figures[name].append(ours(a, corpus, config, *setting))
    best_of = lambda chosen: max(statistics.median(figures[name]) for name in chosen)
    base, with_onednn, best = best_of([base_name]), best_of(
        name for name in peers if "autocast" not in name), best_of(peers)
    print(
        f"T={a.context}, batch {a.batch}, {a.layers} layers of {a.channels} channels, "
        f"{a.precision}; the peer has {result['parameters']:,} parameters"
    )
    for name, values in figures.items():
        middle = statistics.median(values)
        print(
            f"  {name:50s} {middle:9,.0f} tokens/s  (min {min(values):,.0f}, max "
            f"{max(values):,.0f})  {middle / base:.2f}x its default, "
            f"{middle / with_onednn:.2f}x with oneDNN, {middle / best:.2f}x its best")
