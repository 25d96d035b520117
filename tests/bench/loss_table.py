"""The tables of docs/results.md: validation loss after --steps steps of 3,072 tokens of
tinyshakespeare by character, mean and spread of three seeds. `variants` are forms of Sinkhorn
attention at context 256 and b = 16; `mechanisms` are all mechanisms at contexts 256 and 1,024,
where a sparse query sees at most 64 or 128 tokens. Runs of one rank and one thread run in parallel,
one per core. docs/benchmarks/losses.csv has the result of each finished run, with the commit at
which this script was started; these are not repeated.
"""

import argparse
import concurrent.futures
import csv
import json
import os
import statistics
import subprocess
import threading

import birkhoff_runs as runs

TOKENS = 3072  # a step
LEAKY, HONEST = "causal_selection:full_topw", "causal_selection:prefix_topw"


def group(mechanism, heads=0):
    return "group{heads:%d mechanism{%s}}" % (heads, mechanism)


def variants(context):
    sinkhorn = "sinkhorn{block:16 iterations:8 causal_balance:%s pooling:%s}"
    return {
        "dense":
            group("dense{}"),
        "block-local, look_back 0":
            group("block_local{block:16 look_back:0}"),
        "block-local, look_back 1":
            group("block_local{block:16 look_back:1}"),
        "Sinkhorn `uniform`":
            group(sinkhorn % ("uniform", "first")),
        "Sinkhorn `none`, pooling cumulative mean":
            group(sinkhorn % ("none", "cumulative_mean")),
        "Sinkhorn `none`, pooling first":
            group(sinkhorn % ("none", "first")),
        "Sinkhorn `prefix`, pooling cumulative mean":
            group(sinkhorn % ("prefix", "cumulative_mean")),
        "Sinkhorn `prefix`, pooling first":
            group(sinkhorn % ("prefix", "first")),
        "Sinkhorn `paper_masked` (LEAKS), pooling cumulative mean":
            group(sinkhorn % ("paper_masked", "cumulative_mean")),
    }


def mechanisms(context):
    keys = {256: 64, 1024: 128}[context]
    routing = "routing{clusters:%d window:%d %s}" % (context // keys, keys, "%s")
    local = "block_local{block:%d look_back:1}" % (keys // 2)
    sinkhorn = "sinkhorn{block:%d iterations:8}" % (keys // 2)
    return {
        "dense":
            group("dense{}"),
        "dense, top-k of 8":
            group("dense{normalizer:top_k}"),
        "dense, sparsemax":
            group("dense{normalizer:sparsemax}"),
        "dense, entmax-1.5":
            group("dense{normalizer:entmax15}"),
        "dense, entmax":
            group("dense{normalizer:entmax}"),
        "block-local":
            group(local),
        "sliding window":
            group("sliding_window{width:%d}" % keys),
        "Sinkhorn":
            group(sinkhorn),
        "Sinkhorn Mixture (quadratic)":
            group("sinkhorn_mixture{%s dense{}}" % sinkhorn),
        "MoBA":
            group("moba{block:%d top_blocks:4}" % (keys // 4)),
        "Sparse Transformer, fixed":
            group("sparse_transformer{stride:%d summary:4}" % (keys // 2)),
        "Sparse Transformer, strided":
            group("sparse_transformer{pattern:strided stride:%d}" % (keys // 2)),
        "routing `causal_bucket`":
            group(routing % ""),
        "half block-local, half routing `causal_bucket`":
            group(local, 2) + group(routing % "", 2),
        "routing `full_topw` (LEAKS)":
            group(routing % LEAKY),
        "half block-local, half routing `full_topw` (LEAKS)":
            group(local, 2) + group(routing % LEAKY, 2),
    }


TABLES = {"variants": (variants, [256]), "mechanisms": (mechanisms, [256, 1024])}


class Finished:
    """The losses of finished runs, in a file that a line is added to."""

    FILE = runs.ROOT / "docs/benchmarks/losses.csv"
    FIELDS = [
        "table", "context", "attention", "seed", "steps", "commit", "loss", "loss without the leak"
    ]

    def __init__(self):
        self.lock = threading.Lock()
        self.commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"],
                                              cwd=runs.ROOT,
                                              text=True).strip()
        with open(self.FILE, newline="") as rows:
            self.rows = {
                tuple(row[:5]): [float(loss) for loss in row[6:] if loss]
                for row in csv.reader(rows)
                if row != self.FIELDS
            }

    def add(self, run, losses):
        with self.lock, open(self.FILE, "a", newline="") as rows:
            csv.writer(rows, lineterminator="\n").writerow(
                [*run, self.commit, *(f"{loss:.4f}" for loss in losses)])
        self.rows[run] = losses


def losses(finished, corpus, table, label, attention, context, seed, steps):
    """The validation loss of one run and, where its selection leaks, that of the same model without
    the leak."""
    run = tuple(map(str, (table, context, label, seed, steps)))
    if run not in finished.rows:
        folder = runs.WORK / "table" / "-".join(run).translate({ord(c): "_" for c in " /`"})
        settings = [
            f"data.corpus={corpus}",
            f"data.sequence_length={context}",
            f"train.global_batch={TOKENS // context}",
            f"train.seed={seed}",
            f"train.steps={steps}",
            "metrics.every=100",
            "evaluate.every=0",
            "checkpoint.every=0",
            "watchdog.seconds=0",  # other programs may have the CPUs
            "model.attention.0={%s}" % attention
        ]
        rows = runs.train(runs.ROOT / "configs/baby_gpt_dense.txtpb", folder, settings, threads=1)
        found = [[row["loss"] for row in rows if "split" in row][-1]]
        if LEAKY in attention:
            honest = "model.attention.0={%s}" % attention.replace(LEAKY, HONEST)
            found.append(
                json.loads(runs.birkhoff("eval", folder, "--json", "--set", honest,
                                         threads=1))["loss"])
        finished.add(run, found)
        print(
            f"context {context}, seed {seed}: {', '.join(f'{loss:.4f}' for loss in found)}  "
            f"{label}",
            flush=True)
    return finished.rows[run]


def line(label, values):
    each = ", ".join(f"{loss:.4f}" for loss in values)
    print(f"| {label} | {statistics.mean(values):.4f} | {max(values) - min(values):.4f} | {each} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", choices=TABLES, default="mechanisms")
    parser.add_argument("--contexts", type=int, nargs="+", help="default: all of the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="parallel runs")
    parser.add_argument("--only", default="", help="substring of the arms to run")
    a = parser.parse_args()
    arms, contexts = TABLES[a.table]
    contexts = a.contexts or contexts
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    # Seed by seed, so that an interrupted table has results for every arm.
    finished, done = Finished(), {}
    with concurrent.futures.ThreadPoolExecutor(a.workers) as pool:
        for seed in a.seeds:
            for context in contexts:
                for label, attention in arms(context).items():
                    if a.only in label:
                        done[context, label,
                             seed] = pool.submit(losses, finished, corpus, a.table, label,
                                                 attention, context, seed, a.steps)
    for context in contexts:
        print(
            f"\nContext {context}\n\n| attention | mean | spread | seeds {a.seeds} "
            "|\n|---|---|---|---|"
        )
        for label in arms(context):
            if a.only in label:
                rows = list(zip(*[done[context, label, seed].result() for seed in a.seeds]))
                line(label, rows[0])
                if len(rows) == 2:
                    line(
                        f"the same models, evaluated by `prefix_topw`: the leak is worth "
                        f"{statistics.mean(rows[1]) - statistics.mean(rows[0]):.4f} nats", rows[1])


if __name__ == "__main__":
    main()
