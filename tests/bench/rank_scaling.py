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


def speed(corpus, a, batch, ranks, folder, settings=()):
    rows = runs.train(
        runs.ROOT / a.config,
        runs.WORK / folder, [
            f"data.corpus={corpus}", f"train.global_batch={batch}", f"train.steps={a.steps}",
            f"metrics.every={max(1, a.steps // 10)}", "evaluate.sequences=1", "checkpoint.every=0",
            *a.settings, *settings
        ],
        ranks=ranks,
        threads=1)
    return runs.training_speed(rows)


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
    together, apart = [], []
    for _ in range(a.rounds):
        together.append(
            speed(corpus, a, a.batch, 2, "scaling_two", ["mesh.tensor=2"] if a.tensor else []))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            copies = [
                pool.submit(speed, corpus, a, a.batch // 2, None, f"scaling_copy{i}")
                for i in range(2)
            ]
            apart.append(sum(copy.result() for copy in copies))
    two, floor = statistics.median(together), statistics.median(apart)
    axis = "tensor-parallel" if a.tensor else "data-parallel"
    print(f"{a.config} {' '.join(a.settings)}, batch {a.batch} over two {axis} ranks")
    print(
        f"  floor, two independent copies: {floor:9,.0f} tokens/s in total  (min "
        f"{min(apart):,.0f}, max {max(apart):,.0f})"
    )
    print(
        f"  one run of two ranks:          {two:9,.0f} tokens/s           (min "
        f"{min(together):,.0f}, max {max(together):,.0f})"
    )
    print(f"  ratio {two / floor:.3f}")


if __name__ == "__main__":
    main()
