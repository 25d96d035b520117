"""Forward + backward of routing attention, MoBA and top-1 Sinkhorn attention, against LibTorch's
eager operations, its best composition (fused attention over gathered rows; dense attention with the
mechanism's mask is no candidate, because it computes all pairs) and attention of our own: dense, or
the soft form of top-1 Sinkhorn attention. Repeats `birkhoff bench attention` for both dtypes, with
all instruction sets of the CPU and with AVX2 only; each table of that command has all its
candidates in interleaved rounds. Prints one table: ratios of medians, the floor, and memory per
token compared with 1,024 tokens.
"""

import argparse
import os

import birkhoff_runs as runs

SETS = {
    "all": {},
    "avx2": {
        "BIRKHOFF_CPU": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2"
    }
}


def routing(length, window, selection):
    return "routing{clusters:%d window:%d causal_selection:%s}" % (length // window, window,
                                                                   selection)


SOFT = "sinkhorn{block:64 iterations:5}"
ARMS = {
    f"routing, w = {w}, {selection}": lambda length, w=w, s=selection: routing(length, w, s)
    for w in (64, 256) for selection in ("causal_bucket", "full_topw")
}
ARMS |= {
    "MoBA, own block of 128 + 3": lambda length: "moba{block:128 top_blocks:4}",
    "Sinkhorn, b = 64": lambda length: SOFT,
    "Sinkhorn, b = 64, top 1": lambda length: "sinkhorn{block:64 iterations:5 top_m:1}"
}


def measured(mechanism, other, length, dtype, a):
    """Candidate -> {forward + backward in ms, its floor, extra MiB}, for the mechanism and for our
    kernel of the other one."""
    report = runs.birkhoff("bench", "attention", mechanism, other, "--lengths", length, "--dtype",
                           dtype, "--rounds", a.rounds, "--batch", a.batch, "--heads", a.heads,
                           "--head-dim", 64)
    found = {}
    for line in report.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 12 and cells[2] != "by" and not cells[2].startswith("---"):
            name = "ours" if cells[0] == other and cells[2] == "birkhoff" else cells[2]
            if cells[0] != other or name == "ours":
                found[name] = {
                    "ms": float(cells[6]),
                    "floor": float(cells[7]),
                    "MiB": float(cells[10])
                }
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--only", default="", help="substring of the arms to run")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    a = parser.parse_args()
    print(
        f"{runs.title()}\n\n| set | dtype | L | attention | ms | floor / time | x eager | x "
        "composed | x ours | memory a token |\n|"
        + "---|" * 10)
    before = dict(os.environ)
    for instructions in a.sets:
        os.environ.clear()
        os.environ.update(before, **SETS[instructions])
        for dtype in a.dtypes:
            for name, mechanism in ARMS.items():
                first = None
                for length in a.lengths:
                    if a.only not in name:
                        continue
                    other = SOFT if name.endswith("top 1") else "dense"
                    found = measured(mechanism(length), other, length, dtype, a)
                    kernel = found["birkhoff"]
                    per_token = kernel["MiB"] / length
                    first = first or per_token
                    ratio = lambda peer: (f"{found[peer]['ms'] / kernel['ms']:.2f}"
                                          if peer in found else "")
                    print(
                        f"| {instructions} | {dtype} | {length} | {name} | {kernel['ms']:.2f} | "
                        f"{kernel['floor'] / kernel['ms']:.2f} | {ratio('LibTorch, eager')} "
                        f"| {ratio('LibTorch, composed')} | {ratio('ours')} "
                        f"({'soft' if other == SOFT else 'dense'}) | {per_token / first:.2f} |",
                        flush=True)


if __name__ == "__main__":
    main()
