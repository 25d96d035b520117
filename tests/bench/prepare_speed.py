"""Speed of `birkhoff prepare` on text like LM1B's, one sentence per line, each a document.

Floor: reading the lines. Peer: the SentencePiece library's own loop over the lines, with the model
that `prepare` gets, on one thread (build/cpu/prepare_peers). Ours: `prepare` with this model and
with bytes, on one rank and on two. Rounds are interleaved; the figures are medians of the time by
the clock of the whole command, start of the program included. Each corpus is compared with that of
one rank, byte for byte.

On a busy machine look at the processor time of one rank, which is printed, too. Targets: one rank
at least 0.9 of the library's loop, and two ranks at least 1.8 times that (on two free cores); bytes
at least 40 MB/s. Exit code 1 if one is missed.
"""

import argparse
import filecmp
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import tempfile
import time

import birkhoff_runs as runs

PEERS = str(pathlib.Path(runs.BIRKHOFF).parent / "prepare_peers")


def peer(*arguments):
    """Bytes, tokens, seconds by the clock and of the processor."""
    done = subprocess.run([PEERS, *map(str, arguments)], capture_output=True, text=True, check=True)
    return [float(value) for value in done.stdout.split()]


def prepare(out, text, tokenizer, ranks):
    """Seconds of one `prepare` by the clock, and of the processor in all its processes."""
    shutil.rmtree(out, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    runs.birkhoff("prepare", "--out", out, "--tokenizer", tokenizer, "--lines", "--valid", 0.01,
                  *(["--ranks", ranks] if ranks > 1 else []), text, threads=1)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def require_same(one, other):
    names = sorted(path.name for path in one.iterdir())
    if names != sorted(path.name for path in other.iterdir()) or filecmp.cmpfiles(
            one, other, names, shallow=False)[0] != names:
        raise SystemExit(f"{other}: differs from {one}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=150, help="size of the text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--folder", default="/dev/shm", help="where texts and corpora are made")
    a = parser.parse_args()
    print(runs.title())
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        folder = pathlib.Path(folder)
        text, sample = folder / "text", folder / "sample"
        subprocess.run([PEERS, "write", text, str(a.mb)], check=True)
        subprocess.run([PEERS, "write", sample, "8"], check=True)
        runs.birkhoff("prepare", "--out", folder / "model", "--tokenizer", "sentencepiece",
                      "--vocab-size", a.vocab_size, "--valid", 0, sample)
        model = folder / "model/tokenizer.model"
        megabytes = text.stat().st_size / 1e6
        times = {}  # by name: (clock, processor) of each round
        for _ in range(a.rounds):
            for name, arguments in (("reading the lines", ["read", text]),
                                    ("SentencePiece's loop", ["encode", model, text])):
                times.setdefault(name, []).append(peer(*arguments)[2:])
            for tokenizer in (model, "bytes"):
                for ranks in (1, 2):
                    out = folder / f"{pathlib.Path(tokenizer).name}-{ranks}"
                    name = f"prepare, {'the model' if tokenizer == model else tokenizer}, " \
                           f"{ranks} rank{'s' if ranks > 1 else ''}"
                    times.setdefault(name, []).append(prepare(out, text, tokenizer, ranks))
                    if ranks > 1:
                        require_same(out.with_name(out.name[:-1] + "1"), out)

    def speed(name, which):
        return megabytes / statistics.median(round_times[which] for round_times in times[name])

    loop = speed("SentencePiece's loop", 0)
    print(f"{a.mb} MB of text, {a.vocab_size} pieces, medians of {a.rounds} rounds; load "
          f"{os.getloadavg()[0]:.1f}\n")
    print(f"| {'':26} | MB/s | of the loop | MB per second of processor time |")
    print(f"|{'-' * 28}|---|---|---|")
    for name in times:
        print(f"| {name:26} | {speed(name, 0):.1f} | {speed(name, 0) / loop:.2f} | "
              f"{speed(name, 1):.1f} |")
    one, two = (speed(f"prepare, the model, {ranks}", 0) for ranks in ("1 rank", "2 ranks"))
    of_bytes = speed("prepare, bytes, 1 rank", 0)
    print(f"\none rank: {one / loop:.2f} of SentencePiece's loop (at least 0.9); two ranks: "
          f"{two / one:.2f} of one, {two / (0.9 * loop):.2f} of 0.9 loops (at least 1.8); bytes: "
          f"{of_bytes:.0f} MB/s (at least 40)")
    if one < 0.9 * loop or two < 1.8 * 0.9 * loop or of_bytes < 40:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
