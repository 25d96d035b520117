"""Predictions of `birkhoff plan` against runs on this machine: parameters, checkpoint size, memory
of a rank, tokens/s.

Plans and runs alternate, and medians are compared, because other load disturbs both. Memory is the
growth of a rank's peak resident set, which the run logs, over that of a run with a tiny model of
the same kind: the program, its libraries and MPI are in both. It has no bar, because the C
library's heap also keeps freed memory that no later tensor fits into;
tests/launcher/plan/trial_test.cpp compares predictions with the bytes of live tensors. Exit code 1
if a prediction misses its bar.
"""

import argparse
import json
import math
import re
import statistics
import sys

import birkhoff_runs as runs

CONFIG = """
task { language_model {} }
data { sequence_length: 256 }
model { layers: 6 channels: 256 heads: 4 %s }
train { global_batch: 16 schedule { warmup_steps: 2 } %s }
checkpoint { every: 0 } evaluate { every: 0 sequences: 16 } metrics { every: 1 tensorboard: false }
watchdog { seconds: 0 }
"""
SINKHORN = "attention { group { mechanism { sinkhorn { block: 32 } } } }"
ROUTING = ("attention { group { heads: 2 mechanism { block_local { block: 32 look_back: 1 } } }"
           " group { mechanism { routing { clusters: 8 } } } }")
# Text of model and train, and settings. At 1,024 tokens a step is larger than a trial, so its time
# is extrapolated.
LONG = ["data.sequence_length=1024"]
MODELS = {
    "dense": ("", "", []),
    "sinkhorn": (SINKHORN, "", []),
    "routing": (ROUTING, "", []),
    "dense, bf16, recomputed, ZeRO":
        ("", "precision: bf16 recompute: true micro_batch: 4 zero_stage: 1", []),
    "dense, 1,024 tokens": ("", "", LONG),
    "sinkhorn, 1,024 tokens": (SINKHORN, "", LONG),
    "routing, 1,024 tokens": (ROUTING, "", LONG),
}
TINY = ["model.layers=1", "model.channels=16", "train.global_batch=2", "train.micro_batch=0"]
BARS = {
    "elements of the model": 0,
    "checkpoint bytes": 0.03,
    "resident memory of a rank, MB": None,
    "tokens/s": 0.15,
    "tokens/s, extrapolated": 0.25
}


def plan(config, corpus, ranks, settings, *more):
    sets = [arg for each in [f"data.corpus={corpus}", *settings] for arg in ("--set", each)]
    return json.loads(runs.birkhoff("plan", config, *sets, "--ranks", ranks, "--json", *more))


def run(config, corpus, ranks, settings, steps):
    """(peak resident MB of rank 0, tokens/s, elements of the model, checkpoint bytes) of a run."""
    folder = runs.WORK / "plan_accuracy_run"
    rows = runs.train(config,
                      folder, [f"data.corpus={corpus}", f"train.steps={steps}", *settings],
                      ranks=ranks)
    log = (folder / "log/rank-0.log").read_text()
    peak = float(re.findall(r"memory: .* ([0-9.]+) MiB at the peak", log)[-1]) * 1.048576
    checkpoint = runs.newest_checkpoint(folder)
    elements = sum(
        math.prod(shape)
        for file in checkpoint.glob("model-*.safetensors")
        for _, shape, _ in runs.read_safetensors(file).values())
    tokenizer = json.loads((checkpoint / "manifest.json").read_text()).get("tokenizerFile")
    size = sum(file.stat().st_size for file in checkpoint.iterdir() if file.name != tokenizer)
    return peak, runs.training_speed(rows), elements, size


def speed_name(prediction):
    extrapolated = any(note.startswith("Times are extrapolated") for note in prediction["notes"])
    return "tokens/s, extrapolated" if extrapolated else "tokens/s"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    a = parser.parse_args()
    corpus = runs.random_corpus()
    print(runs.title())
    print(
        "\n| model | ranks | what | predicted | measured | ratio | bar "
        "|\n|---|---:|---|---:|---:|---:|---:|"
    )
    missed = False
    for name in a.models:
        config = runs.WORK / "plan_accuracy.txtpb"
        *texts, settings = MODELS[name]
        config.write_text(CONFIG % tuple(texts))
        for ranks in a.ranks:
            tiny_plan = plan(config, corpus, ranks, settings + TINY)
            tiny_peak, *_ = run(config, corpus, ranks, settings + TINY, 4)
            predicted, measured = {what: [] for what in BARS}, {what: [] for what in BARS}
            for _ in range(a.rounds):
                p = plan(config, corpus, ranks, settings, "--measure")
                peak, speed, elements, size = run(config, corpus, ranks, settings, a.steps)
                statistic = p["parameters"].get("state_without_gradients",
                                                {"elements": 0})["elements"]
                growth = (p["memory"]["total"]["configured"] -
                          tiny_plan["memory"]["total"]["configured"]) / 1e6
                for what, (of_plan, of_run) in {
                        "elements of the model":
                            (p["parameters"]["total"]["elements"] + statistic, elements),
                        "checkpoint bytes": (p["checkpoint"]["total"]["bytes"], size),
                        "resident memory of a rank, MB": (growth, peak - tiny_peak),
                        speed_name(p): (p["speed"]["tokens"]["per_second"], speed)
                }.items():
                    predicted[what].append(of_plan)
                    measured[what].append(of_run)
            for what, bar in BARS.items():
                if not predicted[what]:
                    continue
                ours, theirs = statistics.median(predicted[what]), statistics.median(measured[what])
                missed |= bar is not None and abs(ours / theirs - 1) > bar
                print(
                    f"| {name} | {ranks} | {what} | {ours:,.0f} | {theirs:,.0f} | "
                    f"{ours / theirs:.3f} | {'' if bar is None else bar or 'exact'} |",
                    flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
