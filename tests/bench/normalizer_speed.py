"""Training-step tokens/s of a causal language model with dense attention and each normalizer, by
default at T = 1024, next to softmax in the same run: one rank with two threads, rounds interleaved.
The paper of top-k reports 0.98 of dense attention's speed (Zhao et al. 2019, "Explicit Sparse
Transformer"); the goal here is at least 1.0.

    python tests/bench/normalizer_speed.py
    python tests/bench/normalizer_speed.py --context 256 --batch 16
"""

import statistics

import peer_speed
import birkhoff_runs as runs

NORMALIZERS = ("softmax", "top_k", "sparsemax", "entmax15")


def main():
    a = peer_speed.parsed()
    corpus = runs.random_corpus()
    speeds = {name: [] for name in NORMALIZERS}
    for _ in range(a.rounds):
        for name, values in speeds.items():
            mechanism = "dense{normalizer:%s}" % name
            values.append(
                peer_speed.ours(a, corpus, "configs/baby_gpt_dense.txtpb", mechanism, None, 2))
    print(f"{runs.title()}\n")
    print(f"T = {a.context}, batch {a.batch}, {a.layers} layers of {a.channels} channels, "
          f"{a.precision}; medians of {a.rounds} rounds\n")
    print("| normalizer | tokens/s | ratio to softmax |\n|---|---:|---:|")
    for name, values in speeds.items():
        ratio = statistics.median(x / base for x, base in zip(values, speeds["softmax"]))
        print(f"| {name} | {statistics.median(values):,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
