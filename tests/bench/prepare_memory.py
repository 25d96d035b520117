"""Peak memory of `birkhoff prepare` on a large text. bytes, chars and words must stay within 300
MB, whatever the size of the text; SentencePiece may also use its own trainer's memory.

The text repeats the lines of a smaller text (tinyshakespeare, or --text) many times in new orders,
and is removed afterwards. The peak is the process's resident memory as the kernel reports it. Exit
code 1 if it is above the limit.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import birkhoff_runs as runs


def write_text(path, lines, megabytes):
    shuffle = random.Random(1)
    left = megabytes * 1_000_000
    with open(path, "wb") as out:
        while left > 0:
            shuffle.shuffle(lines)
            block = b"".join(lines)[:left]
            out.write(block)
            left -= len(block)


def measure(tokenizer, text, folder):
    """Tokens, seconds and peak MB of one prepare, in a separate process, because the kernel keeps
    one peak for all children."""
    script = ("import json, resource, subprocess, sys, time\n"
              "start = time.perf_counter()\n"
              "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
              "seconds = time.perf_counter() - start\n"
              "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6\n"
              "print(json.dumps([done.returncode, done.stderr, seconds, peak]))\n")
    command = [
        runs.BIRKHOFF, "prepare", "--out", folder, "--tokenizer", tokenizer, "--valid", "0.01", text
    ]
    done = subprocess.run([sys.executable, "-c", script, *map(str, command)],
                          capture_output=True,
                          text=True,
                          env=runs.clean_environment(),
                          check=True)
    code, errors, seconds, peak = json.loads(done.stdout)
    if code != 0:
        raise SystemExit(f"prepare --tokenizer {tokenizer}: exit {code}\n{errors}")
    manifest = json.loads((pathlib.Path(folder) / "manifest.json").read_text())
    tokens = sum(
        int(stream["elements"]) for split in manifest["split"] for stream in split["stream"])
    return tokens, seconds, peak


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1000, help="size of the text")
    parser.add_argument("--limit", type=float, default=300, help="MB")
    parser.add_argument("--text",
                        type=pathlib.Path,
                        help="source of the lines; default: tinyshakespeare")
    parser.add_argument("--tokenizers", nargs="+", default=["bytes", "chars", "words"])
    a = parser.parse_args()
    lines = (a.text or runs.shakespeare()).read_bytes().splitlines(keepends=True)
    runs.WORK.mkdir(parents=True, exist_ok=True)
    worst = 0
    with tempfile.TemporaryDirectory(dir=runs.WORK) as folder:
        text = pathlib.Path(folder) / "text.txt"
        write_text(text, lines, a.mb)
        print(f"prepare of {a.mb} MB of text")
        for tokenizer in a.tokenizers:
            tokens, seconds, peak = measure(tokenizer, text, pathlib.Path(folder) / tokenizer)
            worst = max(worst, peak)
            print(
                f"  {tokenizer:14s} {tokens:13,d} tokens  {seconds:7.1f} s  {a.mb / seconds:6.1f} "
                f"MB/s  peak {peak:6.1f} MB"
            )
    print(f"  limit {a.limit:.0f} MB, ratio {worst / a.limit:.3f}")
    sys.exit(worst > a.limit)


if __name__ == "__main__":
    main()
