"""A training step by how long OpenMP's threads spin before they sleep (GOMP_SPINCOUNT), on an idle
machine and next to busy processes.

The program chooses 3000 if the environment does not say otherwise
(launcher/openmp_environment.cpp). The settings alternate in each round; the table holds medians.

    python tests/bench/waiting_threads.py
    python tests/bench/waiting_threads.py --config configs/quickstart.txtpb --rounds 10
"""

import argparse
import re
import statistics
import subprocess
import sys

import birkhoff_runs as runs

CHOSEN = 3000
COUNTS = {"sleep at once": 0, "chosen": CHOSEN, "libgomp's default": 300000}


def step_ms(config, count):
    environment = {
        k: v
        for k, v in runs.clean_environment().items()
        if k not in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    }
    out = subprocess.run(
        [runs.BIRKHOFF, "bench", "step", config, "--steps", "10"],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "GOMP_SPINCOUNT": str(count)},
    ).stdout
    return float(re.search(r"^\| step \| ([\d.]+)", out, re.MULTILINE)[1])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(runs.ROOT / "configs/baby_gpt_dense.txtpb"))
    parser.add_argument("--rounds", type=int, default=10)
    a = parser.parse_args()
    print(f"{runs.title()}\n")
    print(
        "| busy processes | "
        + " | ".join(f"{name} ({count}), ms" for name, count in COUNTS.items())
        + " |"
    )
    print("|---|" + "---:|" * len(COUNTS))
    for load in (0, 1, 2):
        busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(load)]
        try:
            times = {count: [] for count in COUNTS.values()}
            for number in range(a.rounds):
                print(
                    f"{load} busy processes, round {number + 1} of {a.rounds}",
                    file=sys.stderr,
                    flush=True,
                )
                for count in sorted(times, reverse=number % 2 == 1):
                    times[count].append(step_ms(a.config, count))
        finally:
            for process in busy:
                process.kill()
        print(
            f"| {load} | "
            + " | ".join(f"{statistics.median(values):.1f}" for values in times.values())
            + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
