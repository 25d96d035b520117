"""How long a checkpoint holds up training: the demo's model (configs/quickstart.txtpb), saved
often, compared with its own step.

The floor is a step without a save (the median of the same run). The figure is the stall that rank 0
logs at each commit: the copy of the state, the votes, and any waiting. The last save is left out,
because training has ended by then and waits for it. The script prints medians, and the stall as a
fraction of a step, which should be at most 0.03.
"""

import argparse
import re
import statistics

import birkhoff_runs as runs

SAVED = re.compile(r"saved step (\d+): stall ([\d.]+) ms, written in ([\d.]+) s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/quickstart.txtpb")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--words",
                        type=int,
                        help="vocabulary of the corpus of random words; default: random letters")
    parser.add_argument("--set", action="append", default=[], help="settings for the run")
    a = parser.parse_args()
    corpus = runs.random_corpus(a.words)
    run = runs.WORK / "checkpoint_stall"
    rows = runs.train(
        runs.ROOT / a.config,
        run, [
            f"data.corpus={corpus}", f"train.steps={a.steps}", f"checkpoint.every={a.every}",
            "metrics.every=1", "evaluate.every=0", "evaluate.sequences=1", *a.set
        ],
        ranks=a.ranks)
    step_ms = statistics.median(
        row["step_ms"] for row in rows if "step_ms" in row and row["step"] > 2)
    saves = [
        tuple(map(float, found)) for found in SAVED.findall((run / "log/rank-0.log").read_text())
    ]
    saves = [save for save in saves if save[0] < a.steps]
    if not saves:
        raise SystemExit("no save except the last one: use more steps or a smaller --every")
    stalls = [stall for _, stall, _ in saves]
    stall, written = statistics.median(stalls), statistics.median(
        seconds for _, _, seconds in saves)
    print(f"{a.config}, {a.ranks} rank(s), {len(saves)} saves")
    print(f"  floor, a step:        {step_ms:8.2f} ms")
    print(f"  a step with a save:   {step_ms + stall:8.2f} ms, ratio {1 + stall / step_ms:.3f}")
    print(
        f"  stall of a save:      {stall:8.2f} ms (max {max(stalls):.2f}), {stall / step_ms:.3f} "
        f"of a step; written in {written:.2f} s"
    )


if __name__ == "__main__":
    main()
