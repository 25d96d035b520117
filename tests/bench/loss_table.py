"""The table of docs/results.md: validation loss after 2,000 steps at context 256, b = 16, tinyshakespeare by character, mean and
spread of three seeds for each mechanism. Finished runs are kept in build/bench/table and not repeated.
"""

import argparse
import pathlib
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
    "Sinkhorn `paper_masked` (LEAKS), pooling first": SINKHORN % ("paper_masked", "first"),
}


def validation_loss(corpus, attention, seed, steps, folder):
    if (folder / "metrics.jsonl").exists():
        rows = runs.metrics(folder)
    else:
        rows = []
    evaluations = [row for row in rows if "split" in row and row["step"] == steps]
    if not evaluations:
        rows = runs.train(runs.ROOT / "configs/baby_gpt_dense.txtpb", folder,
                          [f"data.corpus={corpus}", "data.sequence_length=256", f"train.seed={seed}", f"train.steps={steps}", "metrics.every=100",
                           "evaluate.every=0", "checkpoint.every=0", f"model.attention.0={attention}"])
        evaluations = [row for row in rows if "split" in row]
    return evaluations[-1]["loss"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", help="substring of the arms to run")
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    print(f"| attention | mean | spread | seeds {a.seeds} |\n|---|---|---|---|", flush=True)
    for number, (name, attention) in enumerate(ARMS.items()):
        if a.only and a.only not in name:
            continue
        losses = [validation_loss(corpus, attention, seed, a.steps, pathlib.Path(runs.WORK) / f"table/{number}-{seed}") for seed in a.seeds]
        print(f"| {name} | {statistics.mean(losses):.4f} | {max(losses) - min(losses):.4f} | {', '.join(f'{x:.4f}' for x in losses)} |", flush=True)


if __name__ == "__main__":
    main()
