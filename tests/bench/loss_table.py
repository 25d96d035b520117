"""The table of docs/results.md: validation loss after 2,000 steps at context 256, b = 16,
tinyshakespeare by character, mean and spread of three seeds for each mechanism. Runs of one rank
and one thread run in parallel, one per core. Finished runs are kept in build/bench/table and not
repeated.
"""

import argparse
import concurrent.futures
import os
import statistics

import birkhoff_runs as runs

SINKHORN = "{group{mechanism{sinkhorn{block:16 iterations:8 causal_balance:%s pooling:%s}}}}"
LOCAL = "{group{mechanism{block_local{block:16 look_back:%d}}}}"
ARMS = {
    "dense": "{group{mechanism{dense{}}}}",
    "block-local, look_back 0": LOCAL % 0,
    "block-local, look_back 1": LOCAL % 1,
    "Sinkhorn `uniform`": SINKHORN % ("uniform", "first"),
    "Sinkhorn `none`, pooling cumulative mean": SINKHORN % ("none", "cumulative_mean"),
    "Sinkhorn `none`, pooling first": SINKHORN % ("none", "first"),
    "Sinkhorn `prefix`, pooling cumulative mean": SINKHORN % ("prefix", "cumulative_mean"),
    "Sinkhorn `prefix`, pooling first": SINKHORN % ("prefix", "first"),
    "Sinkhorn `paper_masked` (LEAKS), pooling cumulative mean": SINKHORN % ("paper_masked", "cumulative_mean"),
}


def validation_loss(corpus, name, seed, steps):
    folder = runs.WORK / f"table/{list(ARMS).index(name)}-{seed}-{steps}"
    kept = runs.metrics(folder) if (folder / "metrics.jsonl").exists() else []
    evaluations = [row for row in kept if "split" in row and row["step"] == steps]
    if not evaluations:
        settings = [f"data.corpus={corpus}", "data.sequence_length=256", f"train.seed={seed}",
                    f"train.steps={steps}", "metrics.every=100", "evaluate.every=0",
                    "checkpoint.every=0", f"model.attention.0={ARMS[name]}"]
        rows = runs.train(runs.ROOT / "configs/baby_gpt_dense.txtpb", folder, settings, threads=1)
        evaluations = [row for row in rows if "split" in row]
        print(f"seed {seed}: {evaluations[-1]['loss']:.4f}  {name}", flush=True)
    return evaluations[-1]["loss"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="parallel runs")
    parser.add_argument("--only", default="", help="substring of the arms to run")
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    names = [name for name in ARMS if a.only in name]
    # Seed by seed, so that an interrupted run has results for every arm.
    with concurrent.futures.ThreadPoolExecutor(a.workers) as pool:
        losses = {(name, seed): pool.submit(validation_loss, corpus, name, seed, a.steps)
                  for seed in a.seeds for name in names}
    print(f"\n| attention | mean | spread | seeds {a.seeds} |\n|---|---|---|---|")
    for name in names:
        row = [losses[name, seed].result() for seed in a.seeds]
        each = ", ".join(f"{loss:.4f}" for loss in row)
        print(f"| {name} | {statistics.mean(row):.4f} | {max(row) - min(row):.4f} | {each} |")


if __name__ == "__main__":
    main()
