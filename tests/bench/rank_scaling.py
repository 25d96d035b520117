"""Two ranks of one training run, data-parallel or tensor-parallel (--tensor), against two
independent single-rank runs at the same time. The work and the cores are the same, so the ratio
shows what communication and waiting cost. One thread per rank; interleaved rounds, medians.

    python tests/bench/rank_scaling.py
    python tests/bench/rank_scaling.py --tensor --steps 20 --set model.layers=6 \
        --set model.channels=384 --set model.heads=6
"""

import argparse
import concurrent.futures
import statistics

import birkhoff_runs as runs


def steps_of(corpus, a, batch, ranks, folder, settings=()):
    """Tokens of a step, and the seconds of each step after the first fifth (warm-up)."""
    rows = runs.train(
        runs.ROOT / a.config,
        runs.WORK / folder, [
            f"data.corpus={corpus}", f"train.global_batch={batch}", f"train.steps={a.steps}",
            "metrics.every=1", "evaluate.sequences=1", "checkpoint.every=0", *a.settings, *settings
        ],
        ranks=ranks,
        threads=1)
    rows = [row for row in rows if "step_ms" in row]
    return rows[0]["tokens"], [row["step_ms"] / 1e3 for row in rows[a.steps // 5:]]


def speed(tokens, seconds):
    """Tokens a second: the median of eight parts of the steps."""
    part = max(1, len(seconds) // 8)
    return tokens / statistics.median(
        statistics.mean(seconds[i:i + part]) for i in range(0, len(seconds) - part + 1, part))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.txtpb")
    parser.add_argument("--batch",
                        type=int,
                        default=16,
                        help="sequences per step of the two-rank run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensor", action="store_true", help="one replica over both ranks")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="PATH=VALUE")
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare_bytes", runs.shakespeare(), tokenizer="bytes")
    together, apart = [], []  # tokens/s
    for _ in range(a.rounds):
        together.append(speed(*steps_of(corpus, a, a.batch, 2, "scaling_two",
                                        ["mesh.tensor=2"] if a.tensor else [])))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            copies = [
                pool.submit(steps_of, corpus, a, a.batch // 2, None, f"scaling_copy{i}")
                for i in range(2)
            ]
            copies = [copy.result() for copy in copies]
        apart.append(sum(speed(*copy) for copy in copies))
    two, floor = map(statistics.median, (together, apart))
    axis = "tensor-parallel" if a.tensor else "data-parallel"
    print(f"{a.config} {' '.join(a.settings)}, batch {a.batch} over two {axis} ranks")
    for name, speeds in (("floor, two independent copies", apart),
                         ("one run of two ranks", together)):
        print(f"  {name:30} {statistics.median(speeds):9,.0f} tokens/s  "
              f"(min {min(speeds):,.0f}, max {max(speeds):,.0f})")
    print(f"  ratio {two / floor:.3f}")


if __name__ == "__main__":
    main()
