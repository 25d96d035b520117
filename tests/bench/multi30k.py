"""BLEU of English to German on Multi30k (Elliott et al. 2016): the models of
configs/multi30k_*.txtpb, with dense, top-k, Sinkhorn or doubly stochastic attention in the encoder.

Each arm trains to the end of its configuration; the mean of its last five checkpoints (`birkhoff
average`) then translates the test split with a beam of 4. The score is that of the reference's own
text; with --sacrebleu, sacreBLEU must print the same to 0.01. Finished arms are kept in
build/bench/multi30k and not repeated; an interrupted one continues. BIRKHOFF_DATA names the folder
that holds multi30k.{train,val,test_2016_flickr}.{en,de}.gz (github.com/multi30k/dataset, task 1).

    python tests/bench/multi30k.py
    python tests/bench/multi30k.py --only dense --steps 150
"""

import argparse
import gzip
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

import birkhoff_runs as runs

FOLDER = runs.WORK / "multi30k"
SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
ARMS = [("dense", 1), ("dense", 2), ("dense", 3), ("topk", 1), ("sinkhorn", 1), ("sinkformer", 1)]
WORDS, AVERAGED = 6000, 5
LEAST_BLEU, MOST_BELOW_DENSE = 25, 1.5


def text(split, language):
    path = FOLDER / f"{split}.{language}"
    if not path.exists():
        source = os.environ.get("BIRKHOFF_DATA")
        if not source:
            raise SystemExit("set BIRKHOFF_DATA to the folder that holds multi30k.*.gz")
        FOLDER.mkdir(parents=True, exist_ok=True)
        packed = pathlib.Path(source) / f"multi30k.{SPLITS[split]}.{language}.gz"
        path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


def corpus():
    folder = FOLDER / "corpus"
    if not (folder / "manifest.json").exists():
        texts = []
        for split, target in (("train", "target"), ("valid", "valid-target"),
                              ("test", "test-target")):
            texts += [f"--{split}", text(split, "en"), f"--{target}", text(split, "de")]
        runs.birkhoff("prepare", "--out", folder, "--tokenizer", "sentencepiece", "--vocab-size",
                      WORDS, *texts)
    return folder


def bleu(hypotheses, with_sacrebleu):
    references = text("test", "de")
    printed = runs.birkhoff("bleu", hypotheses, references)
    ours = float(re.search(r" = ([0-9.]+) ", printed)[1])
    if with_sacrebleu:
        theirs = float(subprocess.run(
            [sys.executable, "-m", "sacrebleu", references, "-i", hypotheses, "-m", "bleu", "-b",
             "-w", "4"], capture_output=True, text=True, check=True).stdout)
        if abs(ours - theirs) > 0.01:
            raise SystemExit(f"{hypotheses}: BLEU is {ours}, and {theirs} of sacreBLEU")
    return ours


def result(arm, seed, steps, threads, with_sacrebleu):
    """BLEU of the mean of the last checkpoints and of the last one, the loss on the validation
    split, and the minutes of all steps."""
    run, lines = runs.train_resumably(
        runs.ROOT / f"configs/multi30k_{arm}.txtpb", FOLDER, f"{arm}-{seed}-{steps or 'all'}",
        [f"data.corpus={corpus()}", f"train.seed={seed}",
         *([f"train.steps={steps}"] if steps else [])], threads)
    mean = FOLDER / f"{run.name}-mean"
    shutil.rmtree(mean, ignore_errors=True)
    found = {"valid_loss": [line["loss"] for line in lines if "split" in line][-1],
             "minutes": lines[-1]["elapsed_seconds"] / 60}
    checkpoints = len(list((run / "checkpoints").glob("step-*")))
    runs.birkhoff("average", run, "--last", min(AVERAGED, checkpoints), "--out", mean)
    for name, model in (("mean", mean), ("last", run)):
        texts = FOLDER / f"{run.name}-{name}.de"
        runs.birkhoff("generate", model, "--input", text("test", "en"), "--out", texts,
                      threads=threads)
        found[name] = bleu(texts, with_sacrebleu)
    shutil.rmtree(run)
    shutil.rmtree(mean)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=sorted({arm for arm, _ in ARMS}))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="instead of the configuration's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sacrebleu", action="store_true")
    a = parser.parse_args()
    print(runs.title())
    print("\nBLEU on test2016 with a beam of 4, of the mean of the last five checkpoints and of "
          "the last one.\n\n"
          "| encoder | seed | BLEU, mean | BLEU, last | validation loss | minutes |\n"
          "|---|---:|---:|---:|---:|---:|")
    scores, low = {}, []
    for arm, seed in ARMS:
        if arm not in a.only or seed not in a.seeds:
            continue
        found = runs.kept(FOLDER, f"bleu-{arm}-{seed}-{a.steps or 'all'}",
                          lambda: result(arm, seed, a.steps, a.threads, a.sacrebleu))
        print(f"| {arm} | {seed} | {found['mean']:.2f} | {found['last']:.2f} | "
              f"{found['valid_loss']:.4f} | {found['minutes']:.1f} |", flush=True)
        scores.setdefault(arm, []).append(found["mean"])
        dense = statistics.mean(scores.get("dense", [LEAST_BLEU]))
        if found["mean"] < (LEAST_BLEU if arm == "dense" else dense - MOST_BELOW_DENSE):
            low.append(f"{arm} {seed}")
    if low and not a.steps:
        raise SystemExit(f"BLEU is lower than {LEAST_BLEU}, or {MOST_BELOW_DENSE} below dense: "
                         f"{', '.join(low)}")


if __name__ == "__main__":
    main()
