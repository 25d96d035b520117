"""Two ranks of one training run against two independent single-rank runs at the same time. The work
and the cores are the same, so the ratio shows what communication and waiting cost. One thread per
rank; interleaved rounds, medians.
"""

import argparse
import concurrent.futures
import statistics

import birkhoff_runs as runs


def speed(corpus, config, batch, steps, ranks, folder):
    rows = runs.train(
        runs.ROOT / config,
        runs.WORK / folder, [
            f"data.corpus={corpus}", f"train.global_batch={batch}", f"train.steps={steps}",
            "metrics.every=10", "evaluate.sequences=1", "checkpoint.every=0"
        ],
        ranks=ranks,
        threads=1)
    return runs.training_speed(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/quickstart.txtpb")
    parser.add_argument("--batch",
                        type=int,
                        default=16,
                        help="sequences per step of the two-rank run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare_bytes", runs.shakespeare(), tokenizer="bytes")
    together, apart = [], []
    for _ in range(a.rounds):
        together.append(speed(corpus, a.config, a.batch, a.steps, 2, "scaling_two"))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            copies = [
                pool.submit(speed, corpus, a.config, a.batch // 2, a.steps, None,
                            f"scaling_copy{i}") for i in range(2)
            ]
            apart.append(sum(copy.result() for copy in copies))
    two, floor = statistics.median(together), statistics.median(apart)
    print(f"{a.config}, batch {a.batch} over two ranks")
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
