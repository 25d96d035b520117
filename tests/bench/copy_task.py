"""Copies 64 symbols over a gap: each sequence has 64 random symbols of 16, dots, and the same 64
symbols, so that T = 256 and a copied symbol is 191 tokens away. Two layers of local windows of 64
reach 128 tokens. Another random symbol stands at each end of the dots and at the start, so that no
symbol to copy, and none before it, has a place of its own in the sequence: a symbol next to the
dots would join their cluster. Prints the share of symbols that a trained model continues correctly,
free-running (greedy, from the first 192 tokens of new sequences). Chance is 1/16.
"""

import argparse
import concurrent.futures
import hashlib
import os
import random

import birkhoff_runs as runs

SYMBOLS, COPIED, DOTS = "abcdefghijklmnop", 64, 125
LENGTH = 2 * COPIED + DOTS + 3
PROMPT = LENGTH - COPIED
LOCAL = "block_local{block:32 look_back:1}"
# much above sqrt(head dim): nothing is learned without
ROUTING = "routing{clusters:4 window:64 logit_scale:32}"
# One table for all places: the first cluster that a symbol shares with its copy teaches it the
# distance.
RELATIVE = "relative_positions{max_distance:224}"
# Noise on the embeddings moves tokens to other clusters now and then: pairs that share no cluster
# get no gradient.
NOISE = "model.dropout.embedding=0.1"
ARMS = {
    "block-local": ["model.attention.0={group{mechanism{%s}}}" % LOCAL],
    "routing `causal_bucket`": [
        "model.attention.0={group{mechanism{%s %s}}}" % (ROUTING, RELATIVE), NOISE
    ],
    "half block-local, half routing `causal_bucket`": [
        "model.attention.0={group{heads:8 mechanism{%s}} group{heads:8 mechanism{%s %s}}}" %
        (LOCAL, ROUTING, RELATIVE), NOISE
    ],
    "MoBA": ["model.attention.0={group{mechanism{moba{block:32 top_blocks:4} %s}}}" % RELATIVE],
}


def sequence(draw):
    symbols = "".join(draw.choices(SYMBOLS, k=COPIED))
    first, second, third = draw.choices(SYMBOLS, k=3)
    return first + symbols + second + "." * DOTS + third + symbols


def corpus(sequences=40_000):
    folder = runs.WORK / "copy_task"
    if not (folder / "corpus/manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, seed, count in (("train", 1, sequences), ("valid", 2, 100)):
            draw = random.Random(seed)
            (folder / f"{name}.txt").write_text("".join(sequence(draw) for _ in range(count)))
        runs.birkhoff("prepare", "--out", folder / "corpus", "--tokenizer", "chars", "--train",
                      folder / "train.txt", "--valid", folder / "valid.txt")
    return folder / "corpus"


def copied_share(run, count):
    """Share of the symbols of `count` new sequences that the model copies."""
    draw, right = random.Random(3), 0
    for _ in range(count):
        text = sequence(draw)
        found = runs.birkhoff("sample",
                              run,
                              "--prompt",
                              text[:PROMPT],
                              "--tokens",
                              COPIED,
                              "--temperature",
                              0,
                              threads=1)
        found = found.strip()[-COPIED:]
        right += sum(a == b for a, b in zip(found, text[-COPIED:]))
    return right / (count * COPIED)


def trained(data, name, a):
    run = runs.WORK / "copy_task" / hashlib.sha1(
        f"{ARMS[name]} {a.seed} {a.steps}".encode()).hexdigest()[:12]
    if not (run / "done").exists():
        settings = [
            f"data.corpus={data}",
            f"data.sequence_length={LENGTH}",
            "data.shift_windows=false",
            "model.layers=2",
            "model.heads=16",
            f"train.seed={a.seed}",
            f"train.steps={a.steps}",
            "train.global_batch=16",
            "train.optimizer.adamw.weight_decay=0",
            "train.schedule.learning_rate=2e-3",
            "metrics.every=100",
            "evaluate.every=500",
            "watchdog.seconds=0",  # other programs may have the CPUs
            *ARMS[name]
        ]
        runs.train(runs.ROOT / "configs/baby_gpt_dense.txtpb", run, settings, threads=1)
        (run / "done").touch()
    share = copied_share(run, a.sequences)
    print(f"{100 * share:.1f} %  {name}", flush=True)
    return share


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=50, help="new sequences to continue")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="parallel runs")
    parser.add_argument("--only",
                        default="",
                        help="the arm to run, or a substring of the arms to run")
    a = parser.parse_args()
    data, names = corpus(), [name for name in ARMS if name == a.only
                            ] or [name for name in ARMS if a.only in name]
    with concurrent.futures.ThreadPoolExecutor(a.workers) as pool:
        shares = list(pool.map(lambda name: trained(data, name, a), names))
    print(
        f"\n{runs.title()}\n\n| attention | symbols copied, chance {100 / len(SYMBOLS):.1f} % "
        "|\n|---|---|"
    )
    for name, share in zip(names, shares):
        print(f"| {name} | {100 * share:.1f} % |")


if __name__ == "__main__":
    main()
