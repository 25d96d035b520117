"""Two ranks of one training run, data-parallel or tensor-parallel (--tensor), against two
independent single-rank runs at the same time. The work and the cores are the same, so the ratio
shows what communication and waiting cost. One thread per rank; interleaved rounds, medians.

The bound is the speed of the two independent runs if each of their steps ended with the slower one:
no run whose ranks wait for each other once a step can be faster on a machine with these cores.

    python tests/bench/rank_scaling.py
    python tests/bench/rank_scaling.py --tensor --steps 20 --set model.layers=6 \
        --set model.channels=384 --set model.heads=6
"""

import argparse
import concurrent.futures
import statistics

import birkhoff_runs as runs


def step_times(corpus, a, batch, ranks, folder, settings=()):
    """Milliseconds of each step, without the first ones (warm-up)."""
    rows = runs.train(
        runs.ROOT / a.config,
        runs.WORK / folder, [
            f"data.corpus={corpus}", f"train.global_batch={batch}", f"train.steps={a.steps}",
            "metrics.every=1", "evaluate.sequences=1", "checkpoint.every=0", *a.settings, *settings
        ],
        ranks=ranks,
        threads=1)
    return [row["step_ms"] for row in rows if "step_ms" in row][2:]


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
    together, apart, waiting = [], [], []  # sequences a second
    for _ in range(a.rounds):
        times = step_times(corpus, a, a.batch, 2, "scaling_two",
                           ["mesh.tensor=2"] if a.tensor else [])
        together.append(1e3 * a.batch / statistics.mean(times))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            copies = [
                pool.submit(step_times, corpus, a, a.batch // 2, None, f"scaling_copy{i}")
                for i in range(2)
            ]
            times = [copy.result() for copy in copies]
        apart.append(sum(1e3 * a.batch / 2 / statistics.mean(each) for each in times))
        waiting.append(1e3 * a.batch / statistics.mean(map(max, *times)))
    two, floor, bound = map(statistics.median, (together, apart, waiting))
    axis = "tensor-parallel" if a.tensor else "data-parallel"
    print(f"{a.config} {' '.join(a.settings)}, batch {a.batch} over two {axis} ranks")
    for name, speeds in (("two independent copies", apart),
                         ("bound: these, if each step waited", waiting),
                         ("one run of two ranks", together)):
        print(f"  {name:34} {statistics.median(speeds):8,.1f} sequences/s  "
              f"(min {min(speeds):,.1f}, max {max(speeds):,.1f})")
    print(f"  ratio {two / floor:.3f}; of the bound {two / bound:.3f}")


if __name__ == "__main__":
    main()
