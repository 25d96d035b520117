"""Peak memory and speed of a training step with the word vocabularies of WikiText-103 and LM1B,
with an ordinary and with an adaptive softmax, and the cost of preparing such a corpus.

The text has every word at least once, and frequencies of Zipf's law. The kernel reports the peak
resident memory of each process when it has ended. The floor of a run is a process that holds no
model, and nine times the parameters: values, gradients, Adam's two moments, new gradients of the
embedding and of the output layer, and a checkpoint's copy of values and moments. Exit code 1 if a
run needs more than its floor and the logits of one step in fp32.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import time

import birkhoff_runs as runs

CONFIG = """
task { language_model {} }
data { sequence_length: 128 }
model { layers: 2 channels: 32 heads: 2 }
train { global_batch: 16 steps: 3 optimizer { adamw {} } schedule { warmup_steps: 2 } }
checkpoint { every: 0 } evaluate { every: 0 sequences: 16 } metrics { every: 1 tensorboard: false }
"""
TOKENS = 128 * 16
# Types of the two corpora, and the cutoffs of Baevski & Auli 2019 for each.
VOCABULARIES = {267735: [20000, 60000], 793471: [60000, 160000]}


def write_text(path, types):
    """Each word once, and two of Zipf's law for each, in lines of 20."""
    generator = random.Random(types)
    words = list(range(types))
    words += [int((2 * types + 1)**generator.random() / 2 - 0.5) for _ in range(2 * types)]
    generator.shuffle(words)
    with open(path, "w") as out:
        for begin in range(0, len(words), 20):
            out.write(" ".join(f"w{word}" for word in words[begin:begin + 20]) + "\n")


def measure(*arguments):
    """(peak MB, seconds, standard error) of one command of the program."""
    start = time.perf_counter()
    process = subprocess.Popen([runs.BIRKHOFF, *map(str, arguments)],
                               stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE,
                               env=runs.clean_environment(threads=1),
                               text=True)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{arguments}: exit {os.waitstatus_to_exitcode(status)}\n{errors}")
    return usage.ru_maxrss * 1024 / 1e6, time.perf_counter() - start, errors


def train(config, corpus, settings):
    """(peak MB, tokens/s, parameters) of one run."""
    run = runs.WORK / "vocabulary_memory"
    subprocess.run(["rm", "-rf", str(run)], check=True)
    sets = [f"data.corpus={corpus}", *settings]
    peak, _, _ = measure("train", config, "--run", run,
                         *(word for setting in sets for word in ("--set", setting)))
    total = re.search(r"^total +(\d+) parameters", runs.birkhoff("inspect", run), re.MULTILINE)
    return peak, runs.training_speed(runs.metrics(run), skip=1), int(total.group(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", type=int, nargs="+", default=list(VOCABULARIES))
    a = parser.parse_args()
    runs.WORK.mkdir(parents=True, exist_ok=True)
    config = runs.WORK / "vocabulary_memory.txtpb"
    config.write_text(CONFIG)
    print(runs.title() + "\n")
    failed = False
    for types in a.types:
        corpus = runs.WORK / f"words_{types}"
        if not (corpus / "manifest.json").exists():
            text = runs.WORK / f"words_{types}.txt"
            write_text(text, types)
            peak, seconds, _ = measure("prepare", "--out", corpus, "--tokenizer", "whitespace",
                                       "--valid", "0.01", text)
            print(f"{types:,} types: prepare of {3 * types:,} words: {seconds:.1f} s, "
                  f"peak {peak:.0f} MB")
        empty, seconds, _ = measure("inspect", corpus)
        print(f"{types:,} types: inspect of the corpus: {seconds:.2f} s, peak {empty:.0f} MB")
        cutoffs = VOCABULARIES.get(types, [types // 10, types // 3])
        plain, adaptive = [], [f"model.adaptive_softmax={{ cutoff: {cutoffs} }}"]
        logits = TOKENS * types * 4 / 1e6
        for name, settings in {"softmax": plain, "adaptive": adaptive}.items():
            peak, speed, parameters = train(config, corpus, settings)
            floor = empty + 9 * 4 * parameters / 1e6
            ok = peak < floor + logits
            failed |= not ok
            print(f"  {name:9s} {parameters:11,d} parameters  peak {peak:6.0f} MB  floor "
                  f"{floor:6.0f} MB  logits in fp32 {logits:6.0f} MB  {speed:8,.0f} tokens/s"
                  f"{'' if ok else '  TOO MUCH'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
