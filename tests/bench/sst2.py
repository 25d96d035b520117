"""Accuracy on SST-2 (Socher et al. 2013): a small encoder with dense, block-local, Sinkhorn,
SortCut or doubly stochastic attention, or top-k, entmax or sparsemax in place of softmax, next to
naive Bayes.

Each run evaluates the validation split after each epoch; the epoch with the best accuracy there is
evaluated on the test split. Finished runs are kept in build/bench/sst2 and not repeated.
BIRKHOFF_DATA names the folder that holds sst2.{train,dev,test}.tsv.gz, each with a header and
`sentence<TAB>label` (github.com/forest-snow/alps, data/SST-2, whose test split is GLUE's
development set). Its dev table is a random part of the phrases of all sentences. So that no phrase
is in both: dev rows that stand in a training row are dropped, which leaves whole sentences, and
then training rows of two or more words that stand in one of these.

    python tests/bench/sst2.py
    python tests/bench/sst2.py --only sinkhorn --seeds 1 --steps 9480
"""

import argparse
import collections
import gzip
import json
import math
import os
import pathlib
import statistics

import birkhoff_runs as runs

FOLDER = runs.WORK / "sst2"
SPLITS = {"train": "train", "valid": "dev", "test": "test"}
BATCH = 64
LOCAL = "model.attention.0={group{mechanism{block_local{block:8 look_back:1}}}}"
SPARSE = "model.attention.0={{group{{mechanism{{dense{{normalizer:{}}}}}}}}}"
ARMS = {
    "dense": ("sst2_dense.txtpb", []),
    "block-local": ("sst2_dense.txtpb", [LOCAL]),
    "sinkhorn": ("sst2_sinkhorn.txtpb", []),
    "sinkformer": ("sst2_sinkformer.txtpb", []),
    "sortcut": ("sst2_sortcut.txtpb", []),
    "sortcut, local": ("sst2_sortcut.txtpb",
                       ["model.attention.0.group.0.mechanism.sortcut.local=true"]),
    "top-k": ("sst2_dense.txtpb", [SPARSE.format("top_k")]),
    "entmax": ("sst2_dense.txtpb", [SPARSE.format("entmax")]),
    "sparsemax": ("sst2_dense.txtpb", [SPARSE.format("sparsemax")]),
}


def tables():
    """The unpacked tables by split."""
    source = os.environ.get("BIRKHOFF_DATA")
    FOLDER.mkdir(parents=True, exist_ok=True)
    result = {}
    for split, name in SPLITS.items():
        result[split] = FOLDER / f"{name}.tsv"
        if result[split].exists():
            continue
        if not source:
            raise SystemExit(
                "set BIRKHOFF_DATA to the folder that holds sst2.{train,dev,test}.tsv.gz"
                " (github.com/forest-snow/alps, data/SST-2)"
            )
        result[split].write_bytes(
            gzip.decompress((pathlib.Path(source) / f"sst2.{name}.tsv.gz").read_bytes())
        )
    return apart(result)


def apart(table):
    """The same tables with no phrase of two or more words both in train and in valid."""
    result = dict(table)

    def keep(split, other, least_words):
        texts = "\n".join(f" {sentence.strip()} " for sentence, _ in rows(result[other]))
        header, *lines = table[split].read_text().splitlines()
        kept = []
        for line in lines:
            words = line.rsplit("\t", 1)[0].split()
            if len(words) < least_words or f" {' '.join(words)} " not in texts:
                kept.append(line)
        result[split] = FOLDER / f"{SPLITS[split]}-apart.tsv"
        result[split].write_text("\n".join([header, *kept]) + "\n")

    keep("valid", "train", least_words=1)
    keep("train", "valid", least_words=2)
    return result


def rows(table):
    lines = table.read_text().splitlines()[1:]
    return [line.rsplit("\t", 1) for line in lines]


def features(sentence):
    words = sentence.split()
    return words + list(zip(words, words[1:]))


def naive_bayes(table):
    """Accuracies on valid and test of multinomial naive Bayes over words and pairs of neighbours,
    with add-one smoothing."""
    counts, documents = collections.defaultdict(collections.Counter), collections.Counter()
    for sentence, label in rows(table["train"]):
        counts[label].update(features(sentence))
        documents[label] += 1
    size = len(set().union(*counts.values()))
    total = {label: sum(counts[label].values()) for label in counts}

    def score(sentence, label):
        score_of = [
            math.log((counts[label][f] + 1) / (total[label] + size)) for f in features(sentence)
        ]
        return math.log(documents[label]) + sum(score_of)

    def accuracy(split):
        good = [
            max(counts, key=lambda label: score(sentence, label)) == truth
            for sentence, truth in rows(table[split])
        ]
        return sum(good) / len(good)

    return accuracy("valid"), accuracy("test")


def prepare(table, words):
    corpus = FOLDER / f"corpus-{words}-apart"
    if not (corpus / "manifest.json").exists():
        runs.birkhoff(
            "prepare",
            "--out",
            corpus,
            "--tokenizer",
            "words",
            "--vocab-size",
            words,
            "--text-column",
            "sentence",
            "--label-column",
            "label",
            "--train",
            table["train"],
            "--valid",
            table["valid"],
            "--test",
            table["test"],
        )
    return corpus


def run_once(corpus, name, seed, steps, settings):
    """Best validation accuracy, its epoch, the test accuracy of that epoch, and the seconds of the
    run."""
    config, more = ARMS[name]
    epoch = -(-len(rows(FOLDER / "train-apart.tsv")) // BATCH)
    folder = FOLDER / "-".join([name, corpus.name, str(seed), str(steps), *settings]).replace(
        "/", "_"
    )
    done = (
        (folder / "metrics.jsonl").exists()
        and runs.metrics(folder)[-1]["step"] == steps
        and "split" in runs.metrics(folder)[-1]
    )
    if not done:
        every = [f"{field}={epoch}" for field in ("checkpoint.every", "evaluate.every")]
        runs.train(
            runs.ROOT / "configs" / config,
            folder,
            [
                f"data.corpus={corpus}",
                f"train.seed={seed}",
                f"train.steps={steps}",
                f"train.global_batch={BATCH}",
                "checkpoint.keep=1000",
                *every,
                *more,
                *settings,
            ],
        )
    lines = runs.metrics(folder)
    best = max((line for line in lines if "split" in line), key=lambda line: line["accuracy"])
    test = json.loads(
        runs.birkhoff(
            "eval", folder / f"checkpoints/step-{best['step']:08}", "--split", "test", "--json"
        )
    )
    return best["accuracy"], best["step"] / epoch, test["accuracy"], lines[-1]["elapsed_seconds"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="substring of the arms to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=3792, help="four epochs")
    parser.add_argument("--words", type=int, default=16000, help="size of the vocabulary")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="further settings of the runs",
    )
    a = parser.parse_args()
    table = tables()
    corpus = prepare(table, a.words)
    print(f"{runs.title()}\n")
    print(
        "| model | valid, % | test, % | test by seed | best epoch | seconds a run"
        " |\n|---|---:|---:|---|---|---:|"
    )
    valid, test = naive_bayes(table)
    print(
        f"| naive Bayes of words and pairs | {100 * valid:.1f} | {100 * test:.1f} | | | |",
        flush=True,
    )
    for name in (name for name in ARMS if a.only in name):
        results = [run_once(corpus, name, seed, a.steps, a.settings) for seed in a.seeds]
        valid, epochs, test, seconds = zip(*results)
        print(
            f"| {name} | {100 * statistics.mean(valid):.1f} | {100 * statistics.mean(test):.1f} |"
            f" {', '.join(f'{100 * each:.1f}' for each in test)} |"
            f" {', '.join(f'{each:.1f}' for each in epochs)} | {statistics.mean(seconds):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
