"""Training-step tokens/s of causal Sinkhorn attention with n_it 5, by default at T = 1024 and b = 64, against PyPI's
sinkhorn_transformer of the same size, interleaved in one run. That package has no causal Sinkhorn normalization: its causal path is a softmax over past
blocks that keeps the best block (our `none`, hardened). So `prefix` does more work than the peer, and `none` is printed for comparison.

The peer runs with PyTorch's defaults, and once more with what a user of PyTorch can switch on. With --precision fp32 that is the matrix-product library
that our program chooses by itself if it is faster (PyTorch uses it only if products may be rounded to bf16); with bf16 it is autocast.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import birkhoff_runs as runs

WARM_UP = 3  # steps that are not measured


def peer(a, threads):
    """Runs in a separate process and prints the peer's tokens/s."""
    import torch
    import torch.nn.functional as F
    from sinkhorn_transformer import SinkhornTransformerLM

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    if a.peer == "switched" and a.precision == "fp32":
        torch.set_float32_matmul_precision("medium")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=a.peer == "switched" and a.precision == "bf16")
    model = SinkhornTransformerLM(num_tokens=65, dim=a.channels, depth=a.layers, heads=a.heads, max_seq_len=a.context,
                                  bucket_size=a.block, causal=True, reversible=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(65, (a.batch, a.context + 1))
    times = []
    for _ in range(a.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 65).float(), tokens[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - start)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"tokens_per_second": a.batch * a.context / statistics.median(times[WARM_UP:]), "parameters": parameters}))


def ours(a, corpus, mode, ranks, threads):
    rows = runs.train(runs.ROOT / "configs/baby_gpt_sinkhorn.txtpb", runs.WORK / "sinkhorn_run",
                      [f"data.corpus={corpus}", f"data.sequence_length={a.context}", f"train.global_batch={a.batch}", f"train.steps={a.steps}",
                       f"model.channels={a.channels}", f"model.layers={a.layers}", f"model.heads={a.heads}",
                       f"train.precision={a.precision}",
                       "metrics.every=1", "evaluate.sequences=1", "checkpoint.every=0",
                       "model.attention.0={group{mechanism{sinkhorn{block:%d causal_balance:%s iterations:5}}}}" % (a.block, mode)],
                      ranks=ranks, threads=threads)
    return runs.training_speed(rows, skip=WARM_UP)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="of our runs; the default peer runs in fp32")
    parser.add_argument("--steps", type=int, default=40, help=f"of which {WARM_UP} are warm-up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", choices=["default", "switched"], help="(internal) run the peer in this process")
    a = parser.parse_args()
    if a.steps <= WARM_UP:
        parser.error(f"--steps {a.steps}: must be above {WARM_UP}, the number of warm-up steps")
    if a.peer:
        return peer(a, 2)
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    base_name = "sinkhorn_transformer (PyPI), 2 threads"
    names = {base_name: "default", "the same, " + ("oneDNN" if a.precision == "fp32" else "autocast"): "switched"}
    for mode in ("prefix", "none"):
        names[f"{mode}, 1 rank x 2 threads"] = (mode, None, 2)
        names[f"{mode}, 2 ranks x 1 thread"] = (mode, 2, 1)
    figures = {name: [] for name in names}
    for _ in range(a.rounds):
        for name, setting in names.items():
            if isinstance(setting, str):
                done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--peer", setting], capture_output=True, text=True, check=True)
                result = json.loads(done.stdout.strip().splitlines()[-1])
                figures[name].append(result["tokens_per_second"])
            else:
                figures[name].append(ours(a, corpus, *setting))
    base = statistics.median(figures[base_name])
    print(f"T={a.context}, batch {a.batch}, b={a.block}, {a.layers} layers of {a.channels} channels, {a.precision}; the peer has {result['parameters']:,} parameters")
    for name, values in figures.items():
        middle = statistics.median(values)
        print(f"  {name:40s} {middle:9,.0f} tokens/s  (min {min(values):,.0f}, max {max(values):,.0f})  ratio {middle / base:.2f}")


if __name__ == "__main__":
    main()
