"""Resident memory of every rank of a training run, early and late: it must not grow with the steps.

The script watches a tiny run through /proc. The run makes as many checkpoints, evaluations and
metrics as a long run makes in hours. The RSS of each rank is read when metrics.jsonl reaches step
200 and step 2,000. Exit code 1 if a rank grew by more than --most.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

import birkhoff_runs as runs

CONFIG = """
task { language_model {} }
data { sequence_length: 64 }
model { layers: 2 channels: 32 heads: 2
  attention { group { mechanism { sinkhorn { block: 8 causal_balance: cumulative } } } } }
train { global_batch: 8 schedule { warmup_steps: 10 } }
checkpoint { every: 100 } evaluate { every: 100 sequences: 16 } metrics { every: 10 }
"""


def ranks_of(run):
    """Process ids of this run's training processes, found by the rank logs that they hold open."""
    found = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            for entry in (process / "fd").iterdir():
                target = entry.readlink()
                if target.parent == (run / "log").resolve() and target.name.startswith("rank-"):
                    found[target.name] = int(process.name)
        except OSError:
            continue  # has ended, or belongs to another user
    return dict(sorted(found.items()))


def resident_mb(process):
    for line in pathlib.Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"process {process} has no VmRSS")


def last_step(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines[-2:] if line.endswith("}")), default=0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--early", type=int, default=200, help="step of the first measurement")
    parser.add_argument("--late", type=int, default=2000, help="step of the last measurement")
    parser.add_argument("--most",
                        type=float,
                        default=2,
                        help="MB that a rank may grow by, for allocator fragmentation")
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare_bytes", runs.shakespeare(), tokenizer="bytes")
    config, run = runs.WORK / "train_memory.txtpb", runs.WORK / "train_memory"
    config.write_text(CONFIG)
    subprocess.run(["rm", "-rf", str(run)], check=True)
    steps = a.late + a.late // 10  # so that the run is still active at the last measurement
    command = [
        runs.BIRKHOFF, "train", config, "--run", run, "--ranks", a.ranks, "--set",
        f"data.corpus={corpus}", "--set", f"train.steps={steps}"
    ]
    training = subprocess.Popen(list(map(str, command)),
                                stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE,
                                text=True,
                                env=runs.clean_environment(threads=1))
    figures = {}
    try:
        for step in (a.early, a.late):
            while last_step(run) < step:
                if training.poll() is not None:
                    raise SystemExit(
                        f"the run ended before step {step}: exit "
                        f"{training.returncode}\n{training.stderr.read()[-2000:]}"
                    )
                time.sleep(0.05)
            ranks = ranks_of(run)
            if len(ranks) != a.ranks:
                raise SystemExit(f"{len(ranks)} of {a.ranks} ranks found at step {step}")
            # The median of several samples, because a checkpoint's buffers come and go.
            samples = {name: [] for name in ranks}
            for _ in range(5):
                for name, process in ranks.items():
                    samples[name].append(resident_mb(process))
                time.sleep(0.02)
            figures[step] = {name: statistics.median(values) for name, values in samples.items()}
    finally:
        training.terminate()
        training.communicate()
    print(f"{a.ranks} ranks, resident MB")
    grown = False
    for name in figures[a.early]:
        early, late = figures[a.early][name], figures[a.late][name]
        grown |= late - early > a.most
        print(
            f"  {name:12s} step {a.early}: {early:7.2f}   step {a.late}: {late:7.2f}   growth "
            f"{late - early:+.2f} MB, ratio {late / early:.4f}"
        )
    sys.exit(grown)


if __name__ == "__main__":
    main()
