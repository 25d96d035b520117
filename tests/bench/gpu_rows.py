"""Rows of the table of figures of gpu_first.sh: reads the output of `birkhoff bench attention`, of
`bench step`, of a program of the kernel lab or of operator_cost.py, and that of the same command at
an earlier commit, or an empty file. Next to each figure stands what gpu_expected.csv expects of it
on this card, or on any if its row names none: a prediction, or a bound that must hold.

    python3 tests/bench/gpu_rows.py CARD NOW BEFORE
"""

import csv
import pathlib
import re
import sys

EXPECTED = pathlib.Path(__file__).with_name("gpu_expected.csv")
# The columns, and what gpu_expected.csv may name.
MEASURES = ("us", "before", "x before", "dense x before", "x dense", "share")


def tables(text):
    """(the nearest line above its table, {column: cell}) for each row. Of two columns of one name
    the last counts: in `bench attention` those of forward and backward together."""
    line_above, header, last = "", None, ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|---"):
            header = last
        elif line.startswith("|") and header:
            yield line_above, dict(zip(header, cells))
        elif not line.startswith("|"):
            header = None
            line_above = line or line_above
        last = cells


def number(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def figures(text):
    """{name: {measure: value}}; `tokens`, `predicted` and `dense us` are no columns."""
    found, dense = {}, {}
    config = re.search(r"`birkhoff bench step \S*?([^/\s]+)\.txtpb", text)
    for above, row in tables(text):
        if "by" in row:
            shape = f"{'encoder' if ', not causal' in above else 'causal'}, L {row['L']}"
            both = 1e3 * float(row["forward + backward, ms"])
            if row["by"] == "birkhoff":
                found[f"{row['mechanism']}, {shape}"] = {
                    "us": both,
                    "x dense": number(row["dense / time"]),
                    "share": number(row["floor / time"]),
                    "shape": shape
                }
            elif row["by"].startswith("LibTorch, dense"):
                dense[shape] = min(both, dense.get(shape, both))
        elif "part" in row and config and row["part"].startswith("step"):
            # "step", then perhaps "step, recorded".
            found[f"step of {config[1]}"] = {
                "us": 1e3 * float(row["ms"]),
                "tokens": number(row["tokens/s"])
            }
        elif "kernel" in row:
            found[f"{row['kernel']}, {row['shape']}"] = {
                "us": float(row["us"]),
                "share": number(row["share of copy speed"]),
                "predicted": number(row["predicted us"])
            }
        elif "us a call" in row:
            found[f"operator {row['operator, forward + backward']}"] = {
                "us": float(row["us a call"]),
                "x dense": 1 / float(row["/ SDPA's"])
            }
    for each in found.values():
        each["dense us"] = dense.get(each.pop("shape", None))
    return found


def compared(now, before):
    """Adds the measures that need both commits."""
    for name, each in now.items():
        old = before.get(name, {})
        each["before"] = old.get("us")
        for measure, time in (("x before", "us"), ("dense x before", "dense us")):
            if old.get(time) and each.get(time):
                each[measure] = old[time] / each[time]
    return now


def shown(value):
    return "" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def expectation(name, each, card, rows):
    """What is expected of a figure, and how it compares."""
    expected = [(row["measure"], number(row["predicted"]), number(row["at least"])) for row in rows
                if row["figure"] == name and row["card"] in card]
    if each.get("predicted"):
        expected.append(("us", each["predicted"], None))
    texts = []
    for measure, predicted, least in expected:
        value = each.get(measure)
        if value is None:
            texts.append(f"{measure}: not measured")
        elif predicted:
            texts.append(f"{measure}: predicted {shown(predicted)}, "
                         f"result {value / predicted:.2f} of it")
        else:
            texts.append(f"{measure} at least {least:g}: {'yes' if value >= least else 'NO'}")
    return "; ".join(texts)


def main():
    card, *files = sys.argv[1:]
    now, before = (figures(pathlib.Path(file).read_text(errors="replace")) for file in files)
    with open(EXPECTED, newline="") as file:
        rows = list(csv.DictReader(file))
    for name, each in compared(now, before).items():
        tokens = f", {each['tokens'] / 1e6:.2f} million tokens/s" if each.get("tokens") else ""
        cells = [card, name + tokens, *(shown(each.get(measure)) for measure in MEASURES)]
        print(f"| {' | '.join(cells)} | {expectation(name, each, card, rows)} |")


if __name__ == "__main__":
    main()
