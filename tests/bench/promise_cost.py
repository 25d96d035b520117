"""What the guarantees cost: tokens/s of a training run on two ranks (one thread each) without any
of them, with the watchdog and the replica checks at their defaults, with a replica check at every
step, and with gradients that do not depend on the number of ranks (train.invariant). Interleaved
rounds, medians, ratios to the first.

With as many shards as ranks, the invariant run computes the same as the plain one. More shards make
smaller matrix products, as micro-batches of that size do; for comparison, the script also measures
the plain run with such micro-batches.
"""

import argparse
import statistics

import birkhoff_runs as runs

OFF = ["agreement.every=0", "watchdog.seconds=0"]


def arms(batch):
    yield "nothing", OFF
    yield "watchdog, agreement every 100 steps (defaults)", []
    yield "agreement every step", ["agreement.every=1", "watchdog.seconds=0"]
    for shards in (2, 4, 8):
        yield f"invariant, {shards} shards", OFF + [f"train.invariant.shards={shards}"]
        if shards > 2:
            yield f"nothing, micro-batches of {batch // shards}", OFF + [
                f"train.micro_batch={batch // shards}"
            ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/quickstart.txtpb")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step over both ranks")
    parser.add_argument("--steps", type=int, default=101)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--arms",
        default="",
        help="only the arms whose names contain one of these texts, separated by semicolons")
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare_bytes", runs.shakespeare(), tokenizer="bytes")
    chosen = [(name, settings)
              for name, settings in arms(a.batch)
              if name == "nothing" or any(word in name for word in a.arms.split(";"))]
    speeds = {name: [] for name, _ in chosen}
    for _ in range(a.rounds):
        for name, settings in chosen:
            rows = runs.train(runs.ROOT / a.config,
                              runs.WORK / "promise_cost", [
                                  f"data.corpus={corpus}", f"train.global_batch={a.batch}",
                                  f"train.steps={a.steps}", "metrics.every=10",
                                  "evaluate.sequences=1", "checkpoint.every=0", *settings
                              ],
                              ranks=2,
                              threads=1)
            speeds[name].append(runs.training_speed(rows))
    floor = statistics.median(speeds["nothing"])
    print(f"{a.config}, batch {a.batch} over two ranks, medians of {a.rounds} interleaved rounds")
    print("| run | tokens/s | ratio |\n|---|---|---|")
    for name, row in speeds.items():
        print(f"| {name} | {statistics.median(row):,.0f} | {statistics.median(row) / floor:.3f} |")


if __name__ == "__main__":
    main()
