"""Compares `birkhoff bleu` with sacreBLEU on random texts, and on text files if some are given.

    python3 -m venv ~/.cache/birkhoff/readers
    ~/.cache/birkhoff/readers/bin/pip install sacrebleu
    ~/.cache/birkhoff/readers/bin/python tests/interop/bleu_with_sacrebleu.py \\
        --birkhoff build/cpu/birkhoff [--cases 1000] [REFERENCES.gz ...]

Random segments are made of words, numbers, punctuation in every position, entities and single
characters of many scripts; hypotheses are edited references. A file of references is compared with
an edited and with a shuffled copy. Exits with 1 if a score differs by more than 1e-6, or a
signature by more than its version.
"""

import argparse
import gzip
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import sacrebleu

PIECES = (
    "the cat 3.5 1,000 10-12 a-b it's . .. , ! ? &quot; &amp;lt; &lt; <skipped> - -- $5 50% e.g."
    " (x) \u00fcber \u201eJa\u201c \u2026 \u2013 \u00bd \u20ac + = { } ~ _ / \\ ' \" \u3002"
    " \u0661.\u0662 A.B x,y & ^ ` | @ # 5- -5 .5 5. ;:"
).split(" ") + ["\t", "\u00a0", "\u2028"]
TOKENIZERS = ("13a", "intl", "none")


def segment(rng):
    words = []
    for _ in range(rng.randint(0, 14)):
        word = rng.choice(PIECES)
        if rng.random() < 0.1:
            word = chr(rng.choice((rng.randrange(0x20, 0x3000), rng.randrange(0x1F300, 0x1F900))))
        words.append(word + rng.choice((" ", " ", "")))
    return "".join(words)


def edited(rng, text):
    words = text.split(" ")
    for _ in range(rng.randint(0, 3)):
        i, kind = rng.randrange(len(words)), rng.random()
        if kind < 0.3 and len(words) > 1:
            del words[i]
        elif kind < 0.6:
            words.insert(i, rng.choice(PIECES))
        else:
            j = rng.randrange(len(words))
            words[i], words[j] = words[j], words[i]
    return " ".join(words)


def random_case(rng):
    first = [segment(rng) for _ in range(rng.randint(1, 6))]
    copies = rng.choice((0, 0, 0, 1, 2))
    references = [first] + [[edited(rng, text) for text in first] for _ in range(copies)]
    hypotheses = [edited(rng, t) if rng.random() < 0.8 else segment(rng) for t in first]
    return hypotheses, references


def file_cases(rng, path):
    lines = gzip.open(path, "rt", encoding="utf-8", newline="\n").read().split("\n")[:-1]
    shuffled = list(lines)
    rng.shuffle(shuffled)
    return [([edited(rng, line) for line in lines], [lines]), (shuffled, [lines])]


def ours(program, folder, hypotheses, references, tokenizer):
    names = []
    for i, lines in enumerate([hypotheses] + references):
        names.append(str(folder / f"{i}.txt"))
        text = "".join(line + "\n" for line in lines)
        pathlib.Path(names[-1]).write_text(text, encoding="utf-8", newline="\n")
    command = [program, "bleu", *names, "--tokenize", tokenizer, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--birkhoff", default="build/cpu/birkhoff")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("files", nargs="*", help="references, gzip")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    cases = [(*random_case(rng), rng.choice(TOKENIZERS)) for _ in range(arguments.cases)]
    for path in arguments.files:
        cases += [(*case, t) for case in file_cases(rng, path) for t in TOKENIZERS]
    largest, positive = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for hypotheses, references, tokenizer in cases:
            metric = sacrebleu.BLEU(tokenize=tokenizer)
            expected = metric.corpus_score(hypotheses, references)
            texts = (pathlib.Path(folder), hypotheses, references, tokenizer)
            found = ours(arguments.birkhoff, *texts)
            signature = str(metric.get_signature()).replace(sacrebleu.__version__, "birkhoff")
            difference = abs(found["bleu"] - expected.score)
            if difference > 1e-6 or found["signature"] != signature:
                print(f"differs: {found} {signature} {expected}\n{hypotheses}\n{references}")
                sys.exit(1)
            largest, positive = max(largest, difference), positive + (expected.score > 0)
    print(f"{len(cases)} cases, {positive} above 0: the largest difference is {largest:.1e}")


main()
