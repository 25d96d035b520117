"""Exact match on Tensor2Tensor's sort task (Tay et al. 2020, section 5.1) at the size of
configs/sort_*_smoke.txtpb: models that train on up to 64 symbols sort up to 128, by length.

Exact match is that of greedy decoding, which is that of predictions from the true tokens before
them: the first wrong prediction is the same in both. Finished arms are kept in build/bench/sort and
not repeated; an interrupted one continues. Fails if exact match is lower than expected; with
--steps, or without the dense arm, it only prints.

    python tests/bench/sort_task.py
    python tests/bench/sort_task.py --only dense --steps 300 --cases 3200
"""

import argparse
import re
import shutil

import birkhoff_runs as runs

FOLDER = runs.WORK / "sort"
ARMS = ["dense", "sinkhorn"]
BUCKETS = [(1, 16), (17, 32), (33, 64), (65, 128)]
# Of dense attention up to 32 symbols, and of Sinkhorn attention up to 64.
LEAST_MATCH, MOST_BELOW_DENSE = 95, 3


def corpus(cases):
    folder = FOLDER / f"corpus-{cases}"
    if not (folder / "manifest.json").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        runs.birkhoff("prepare", "--out", folder, "--generate", "sort", "--symbols", 128,
                      "--train-length", 64, "--length", 128, "--test-samples", cases)
    return folder


def by_length(table):
    """Cases, share of right ones and edit distance of each bucket, from the rows of `generate
    --score exact_match`, which have powers of two."""
    rows = [(int(low or high), int(high), int(cases), float(match), float(edits))
            for low, high, cases, match, edits in re.findall(
                r"^\s*(?:(\d+)\D+)?(\d+)\s+(\d+)\s+([0-9.]+)\D+([0-9.]+)\s*$", table, re.MULTILINE)]
    found = []
    for low, high in BUCKETS:
        of_bucket = [row for row in rows if low <= row[0] and row[1] <= high]
        cases = sum(row[2] for row in of_bucket)
        # An edit distance is a share of the ids; ids of a row are about its cases times its length.
        weights = [row[2] * (row[0] + row[1]) for row in of_bucket]
        found.append((cases, sum(row[2] * row[3] for row in of_bucket) / cases,
                      sum(w * row[4] for w, row in zip(weights, of_bucket)) / sum(weights)))
    return found


def result(arm, seed, steps, cases, threads):
    run, lines = runs.train_resumably(
        runs.ROOT / f"configs/sort_{arm}_smoke.txtpb", FOLDER, f"{arm}-{seed}-{steps or 'all'}",
        [f"data.corpus={corpus(cases)}", f"train.seed={seed}",
         *([f"train.steps={steps}"] if steps else [])], threads)
    table = runs.birkhoff("generate", run, "--split", "test", "--beam", 1, "--batch", 256,
                          "--score", "exact_match", "--max-tokens", 130, threads=threads)
    shutil.rmtree(run)
    return {"table": table, "minutes": lines[-1]["elapsed_seconds"] / 60}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="instead of the configuration's")
    parser.add_argument("--cases", type=int, default=32000, help="lengths are uniform")
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    print(runs.title())
    print("\nExact match in % (edit distance) by the number of symbols.\n\n| attention | " +
          " | ".join(f"{low} to {high}" for low, high in BUCKETS) + " | minutes |\n|---|" +
          "---:|" * (len(BUCKETS) + 1))
    matches = {}
    for arm in a.only:
        found = runs.kept(FOLDER, f"sort-{arm}-{a.seed}-{a.steps or 'all'}-{a.cases}",
                          lambda: result(arm, a.seed, a.steps, a.cases, a.threads))
        buckets = by_length(found["table"])
        cells = [f"{match:.2f} ({edits:.4f})" for _, match, edits in buckets]
        print(f"| {arm} | {' | '.join(cells)} | {found['minutes']:.1f} |", flush=True)
        matches[arm] = [match for _, match, _ in buckets]
    print("\nCases: " + ", ".join(f"{cases} of {low} to {high} symbols"
                                  for (cases, _, _), (low, high) in zip(buckets, BUCKETS)))
    if a.steps or "dense" not in matches:
        return
    dense = matches["dense"]
    if (min(dense[:2]) < LEAST_MATCH or
            any(match < reference - MOST_BELOW_DENSE for found in matches.values()
                for match, reference in zip(found[:3], dense[:3]))):
        raise SystemExit(f"exact match is below {LEAST_MATCH} % up to 32 symbols, or more than "
                         f"{MOST_BELOW_DENSE} points below dense attention up to 64")


if __name__ == "__main__":
    main()
