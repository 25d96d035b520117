"""Validation loss of the baby GPT (T=64, batch 12, 2,000 steps, dense, characters) over the whole
validation split, ours and PyTorch's, under one protocol (initialization, schedule, AdamW and
clipping as in configs/baby_gpt_dense.txtpb). The batches differ: PyTorch draws random windows, ours
are a permutation of non-overlapping windows.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import birkhoff_runs as runs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2000)
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    script = pathlib.Path(__file__).with_name("pytorch_gpt.py")
    ours, theirs = [], []
    for seed in a.seeds:
        rows = runs.train(runs.ROOT / "configs/baby_gpt_dense.txtpb", runs.WORK / f"baby_{seed}", [
            f"data.corpus={corpus}", f"train.seed={seed}", f"train.steps={a.steps}",
            "metrics.every=100"
        ])
        ours.append([row["loss"] for row in rows if "split" in row][-1])
        done = subprocess.run([
            sys.executable, script, "--text",
            runs.shakespeare(), "--steps",
            str(a.steps), "--schedule-steps",
            str(a.steps), "--seed",
            str(seed), "--evaluate"
        ],
                              capture_output=True,
                              text=True,
                              check=True)
        theirs.append(json.loads(done.stdout)["validation_loss"])
        print(f"seed {seed}: ours {ours[-1]:.4f}, PyTorch {theirs[-1]:.4f}", flush=True)
    print(f"mean: ours {statistics.mean(ours):.4f}, PyTorch {statistics.mean(theirs):.4f}, "
          f"difference {statistics.mean(ours) - statistics.mean(theirs):+.4f}")


if __name__ == "__main__":
    main()
