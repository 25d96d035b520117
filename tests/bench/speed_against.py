"""Speed of the working tree against another commit: attention kernels and training steps,
interleaved in one run.

Each round runs both programs once, in alternating order. For each figure, the script prints the
median speed ratio over the rounds (above 1: the working tree is faster), the 95 % interval of that
median (from the order statistics of the rounds), and both medians.

    python tests/bench/speed_against.py b8d99b8
    python tests/bench/speed_against.py main --rounds 20 --only 'step'
"""

import argparse
import math
import os
import re
import statistics
import subprocess
import sys

import birkhoff_runs as runs

# Tensors stay in the heap. Otherwise the history of the heap decides which of them the system maps
# and clears at each call, and the same code gets other
# times.
HEAP = {
    "MALLOC_TOP_PAD_": str(2**29),
    "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1),
    "MALLOC_MMAP_THRESHOLD_": str(2**30)
}

STEPS = {"baby_gpt_dense": 64, "baby_gpt_sinkhorn": 256}


def kernel_times(tree):
    """Name -> CPU milliseconds of forward + backward by the fused path, from attention_bench
    paths."""
    out = subprocess.run(
        [tree / "build/cpu/attention_bench", "paths", "4", "4", "1024", "32", "64", "1", "3"],
        capture_output=True,
        text=True,
        check=True,
        env={
            **runs.clean_environment(),
            **HEAP
        }).stdout
    times, table = {}, ""
    for line in out.splitlines():
        if " ms " in line:
            table = re.split(r"\s{2,}", line)[0]
        elif row := re.match(r"(own .*?)\s{2,}([\d.]+)\s+\S+\s+\S+\s+([\d.]+)", line):
            times.update({
                f"{table}: {row[1]}, {dtype}": float(row[i])
                for i, dtype in ((2, "fp32"), (3, "bf16"))
            })
    if not times:
        raise SystemExit(f"attention_bench of {tree} printed no table:\n{out}")
    return times


def step_times(tree, corpus):
    """Name -> median milliseconds of a training step on one thread."""
    times = {}
    for config, context in STEPS.items():
        run = runs.WORK / "speed_against"
        subprocess.run(["rm", "-rf", str(run)], check=True)
        arguments = [
            tree / "build/cpu/birkhoff", "train", runs.ROOT / f"configs/{config}.txtpb", "--run",
            run
        ]
        for setting in (f"data.corpus={corpus}", f"data.sequence_length={context}",
                        "train.global_batch=8", "train.steps=16", "metrics.every=1",
                        "metrics.tensorboard=false", "evaluate.sequences=1", "checkpoint.every=0"):
            arguments += ["--set", setting]
        subprocess.run(arguments,
                       check=True,
                       capture_output=True,
                       env={
                           **runs.clean_environment(1),
                           **HEAP
                       })
        times[f"step: {config}, T={context}"] = statistics.median(
            [row["step_ms"] for row in runs.metrics(run) if "step_ms" in row][4:])
    return times


def interval(values):
    """95 % interval of the median: order statistics of the binomial distribution."""
    values, n = sorted(values), len(values)
    below, tail = 0, 0.0
    while below < n // 2 and (tail := tail + math.comb(n, below) / 2**n) <= 0.025:
        below += 1
    low = max(below - 1, 0)
    return values[low], values[n - 1 - low]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="commit to compare with")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=["kernel", "step"], help="only these figures")
    a = parser.parse_args()
    if a.rounds < 2:
        parser.error(f"--rounds {a.rounds}: at least 2")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sha, base = runs.build_commit(a.base, "birkhoff", "attention_bench")
    runs.build(runs.ROOT, "birkhoff", "attention_bench")
    corpus = runs.random_corpus(tree=base)  # newer programs read it, too
    measures = [kernel_times] if a.only != "step" else []
    if a.only != "kernel":
        measures.append(lambda tree: step_times(tree, corpus))
    times = {base: {}, runs.ROOT: {}}
    for number in range(a.rounds):
        print(f"round {number + 1} of {a.rounds}", file=sys.stderr, flush=True)
        for tree in (base, runs.ROOT) if number % 2 == 0 else (runs.ROOT, base):
            for measure in measures:
                for name, value in measure(tree).items():
                    times[tree].setdefault(name, []).append(value)
    print(f"{runs.title()}; against {sha}\n")
    print(f"| | ratio of speeds | 95 % interval | {sha}, ms | now, ms |\n|---|---:|---:|---:|---:|")
    for name, before in times[base].items():
        now = times[runs.ROOT][name]
        ratios = [x / y for x, y in zip(before, now)]
        low, high = interval(ratios)
        print(
            f"| {name} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | "
            f"{statistics.median(before):.2f} | {statistics.median(now):.2f} |",
            flush=True)


if __name__ == "__main__":
    main()
