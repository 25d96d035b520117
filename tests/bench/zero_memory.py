"""Memory of a rank with each stage of ZeRO, next to `birkhoff plan`, and what a stage costs.

Each rank logs its resident memory before the first step, which has no gradients of stages 2 and 3
and no gathered values, and its peak. The program and LibTorch are counted once, by a run of a tiny
model. Losses of all stages must be bit-identical.
"""

import argparse
import json
import re
import shutil
import statistics

import birkhoff_runs as runs

CONFIG = """
task { language_model {} }
data { sequence_length: 256 }
model { layers: 8 channels: 512 heads: 8 }
train { global_batch: 4 recompute: true optimizer { adamw {} } schedule { warmup_steps: 10 } }
checkpoint { every: 0 } evaluate { every: 0 sequences: 1 micro_batch: 1 } metrics { every: 1
tensorboard: false }
"""


def measure(config, corpus, ranks, settings, steps):
    """(MB before the first step, peak MB, tokens/s, losses) of one run."""
    run = runs.WORK / "zero_memory"
    shutil.rmtree(run, ignore_errors=True)
    runs.train(config, run, [f"data.corpus={corpus}", f"train.steps={steps}", *settings], ranks)
    log = (run / "log/rank-0.log").read_text()
    before = float(re.search(r"memory before the first step: ([\d.]+) MiB", log)[1])
    peak = float(re.search(r"memory: .*?([\d.]+) MiB at the peak", log)[1])
    rows = runs.metrics(run)
    return (before * 1.048576, peak * 1.048576, runs.training_speed(rows, skip=1),
            [row["loss"] for row in rows if "lr" in row])


def planned(config, corpus, ranks, settings):
    """MB of values, gradients and optimizer state, and of the buckets in use, of a rank."""
    plan = json.loads(
        runs.birkhoff("plan", config, "--json", "--ranks", ranks,
                      *(word for setting in [f"data.corpus={corpus}", *settings]
                        for word in ("--set", setting))))["memory"]
    mb = lambda part: plan[part]["configured"] / 1e6
    return (mb("values") + mb("gradients") + mb("optimizer_state"),
            mb("values_and_gradients_of_a_layer_in_use"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    config = runs.WORK / "zero_memory.txtpb"
    config.write_text(CONFIG)
    print(runs.title())
    print("| ranks | stage | planned state, MB | + in use, MB | before the first step, MB | at the"
          " peak, MB | tokens/s |\n|---:|---:|---:|---:|---:|---:|---:|")
    for ranks in a.ranks:
        tiny = measure(config, corpus, ranks, ["model.layers=1", "model.channels=8"], 2)
        stages = {stage: [f"train.zero_stage={stage}"] for stage in range(4)}
        figures = {stage: [] for stage in stages}
        for _ in range(a.rounds):
            for stage, settings in stages.items():
                figures[stage].append(measure(config, corpus, ranks, settings, a.steps))
        for stage, settings in stages.items():
            if any(each[3] != figures[0][0][3] for each in figures[stage]):
                raise SystemExit("losses differ")
            median = [statistics.median(each[i] for each in figures[stage]) for i in range(3)]
            state, in_use = planned(config, corpus, ranks, settings)
            print(f"| {ranks} | {stage} | {state:.0f} | {in_use:.0f} | {median[0] - tiny[0]:.0f} |"
                  f" {median[1] - tiny[1]:.0f} | {median[2]:,.0f} |")


if __name__ == "__main__":
    main()
