"""Peak memory of a training run with and without recomputed activations, and what recomputation
costs.

The two kinds of run alternate. The kernel reports each run's peak resident memory when its process
has ended. Losses must be bit-identical.
"""

import argparse
import os
import statistics
import subprocess

import birkhoff_runs as runs

CONFIG = """
task { language_model {} }
data { sequence_length: 256 }
model { channels: 256 heads: 4 }
train { global_batch: 16 optimizer { adamw {} } schedule { warmup_steps: 10 } }
checkpoint { every: 0 } evaluate { every: 0 sequences: 1 micro_batch: 1 } metrics { every: 1
tensorboard: false }
"""


def measure(config, corpus, layers, recompute, steps):
    """(peak MB, tokens/s, losses) of one run."""
    run = runs.WORK / "recompute_memory"
    subprocess.run(["rm", "-rf", str(run)], check=True)
    command = [
        runs.BIRKHOFF, "train", config, "--run", run, "--set", f"data.corpus={corpus}", "--set",
        f"model.layers={layers}", "--set", f"train.steps={steps}", "--set",
        f"train.recompute={'true' if recompute else 'false'}"
    ]
    process = subprocess.Popen(list(map(str, command)),
                               stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL,
                               env=runs.clean_environment())
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: exit {os.waitstatus_to_exitcode(status)}")
    rows = runs.metrics(run)
    return usage.ru_maxrss * 1024 / 1e6, runs.training_speed(rows,
                                                             skip=1), [row["loss"] for row in rows]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    config = runs.WORK / "recompute_memory.txtpb"
    config.write_text(CONFIG)
    base, _, _ = measure(config, corpus, 1, True, a.steps)
    print(f"floor (one layer, recomputed): {base:.0f} MB")
    for layers in a.layers:
        figures = {False: [], True: []}
        for _ in range(a.rounds):
            for recompute in figures:
                figures[recompute].append(measure(config, corpus, layers, recompute, a.steps))
        if any(figures[recompute][i][2] != figures[False][0][2]
               for recompute in figures
               for i in range(a.rounds)):
            raise SystemExit("losses differ")
        memory, speed = ({
            recompute: statistics.median(figure[i]
                                         for figure in rows)
            for recompute, rows in figures.items()
        }
                         for i in (0, 1))
        print(
            f"{layers} layers: {memory[False]:6.0f} MB, recomputed {memory[True]:6.0f} MB, ratio "
            f"{memory[True] / memory[False]:.2f}; "
            f"tokens/s {speed[False]:,.0f}, recomputed {speed[True]:,.0f}, ratio "
            f"{speed[True] / speed[False]:.2f}; losses bit-identical"
        )


if __name__ == "__main__":
    main()
