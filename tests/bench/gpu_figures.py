"""Measures the GPU figures and compares each with its target. Runs `birkhoff bench`, step_speed.py,
checkpoint_stall.py and a training on both devices, and writes one Markdown page: a table of the
targets, then the output of the commands. Exit code 1 if a target is missed or a command fails.

- operators: our operators in PyTorch, by tests/interop/pytorch_operators.py and
tests/bench/attention_peers.py.
- kernels: bf16, B H = 64, D = 64, 128 and 256, causal and not, launched as CUDA graphs: share of
the floor (the larger of bytes at copy speed and
  FLOPs at the speed of at::mm), and time against the fastest of LibTorch's dense kernels, including
  cuDNN's.
- step: configs/lmx_base_*.txtpb, 64k tokens a step: share of the matrix speed of the same run,
PyTorch compiled, loader wait, stall of a save.
- loss: the demo's configuration on the CPU and on the GPU, mean of the last 50 of 500 steps.

    python tests/bench/gpu_figures.py --build build/cuda --report docs/benchmarks/gpu.md
    # small shapes: tests that the script runs
    python tests/bench/gpu_figures.py --build build/cpu --device cpu --report /tmp/try.md
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys

import birkhoff_runs as runs

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ("operators", "kernels", "step", "loss")
# Share of the floor, forward and forward + backward; times faster than dense at 4,096 tokens, not
# causal and causal.
KERNELS = {
    "block_local { block: 64 }": ((0.70, 0.60), None),
    "block_local { block: 128 }": ((0.70, 0.60), None),
    "sinkhorn { block: 64 }": ((0.45, 0.40), (7, 4))
}


class Report:
    """The page, written again after each figure: what was measured stays if the script is ended."""
    def __init__(self, path):
        self.path, self.bars, self.pages = path, [], []

    def bar(self, name, figure, least=None, most=None):
        held = figure >= least if most is None else figure <= most
        self.bars.append(
            (name, f"{figure:.4g}", f">= {least:g}" if most is None else f"<= {most:g}",
             "yes" if held else "NO"))
        print("  ".join(self.bars[-1]), flush=True)
        self.write()

    def failed(self, name, why):
        self.bars.append((name, "", "", f"FAILED: {why}"))
        print(f"{name}: FAILED: {why}", flush=True)
        self.write()

    def run(self, name, line):
        """Runs a command and adds its output to the page. Returns the output, or None if the
        command fails."""
        line = [str(x) for x in line]
        shown = " ".join(f"'{x}'" if " " in x else x for x in line).replace(
            sys.executable, "python").replace(str(runs.ROOT) + "/", "")
        done = subprocess.run(line,
                              capture_output=True,
                              text=True,
                              env=dict(os.environ, BIRKHOFF=runs.BIRKHOFF))
        self.pages.append(f"## {name}\n\n`{shown}`\n\n{done.stdout.strip()}\n")
        self.write()
        if done.returncode == 0:
            return done.stdout
        self.failed(
            name,
            f"exit code {done.returncode}: "
            f"{(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
        return None

    def write(self):
        head = "# Figures on a GPU\n\n| what | figure | target | met |\n|---|---:|---:|---|\n"
        self.path.write_text(head + "".join(f"| {' | '.join(row)} |\n" for row in self.bars) +
                             "\n" + "\n".join(self.pages))


def table(text):
    """Rows of a Markdown table as lists of cells."""
    return [[cell.strip()
             for cell in line.strip().strip("|").split("|")]
            for line in text.splitlines()
            if line.startswith("| ")]


def operators(a, report):
    library = next(
        (each for each in (a.build / "lib/libbirkhoff_ops.so", a.build / "libbirkhoff_ops.so")
         if each.exists()), None)
    if library is None:
        return report.failed("operators", f"no libbirkhoff_ops.so in {a.build}")
    text = report.run("Operators in PyTorch", [
        sys.executable, runs.ROOT / "tests/interop/pytorch_operators.py", "--library", library,
        "--device", a.device
    ])
    if text is not None:
        report.bar("operators in PyTorch: checks that fail", 0, most=0)
    lengths, heads = ("1024,4096", 16) if a.device == "cuda" else ("128", 2)
    report.run("Peers in PyTorch", [
        sys.executable, HERE / "attention_peers.py", "--library", library, "--device", a.device,
        "--dtype", "bf16", "--heads", heads, "--lengths", lengths,
        *(["--no-compile"] if a.no_compile else [])
    ])


def kernels(a, report):
    lengths, short = ([4096, 16384], [128, 256, 512]) if a.device == "cuda" else ([256], [128])
    sizes = [
        "--device", a.device, "--dtype", "bf16", "--batch", 4 if a.device == "cuda" else 1,
        "--heads", 16 if a.device == "cuda" else 2
    ]
    shares = {}
    for head_dim in (64, 128, 256):
        for encoder in (False, True):
            kind = f"D = {head_dim}, {'not causal' if encoder else 'causal'}"
            text = report.run(f"Kernels, {kind}", [
                runs.BIRKHOFF, "bench", "attention", *KERNELS, *sizes, "--head-dim", head_dim,
                "--lengths", ",".join(map(str, short + lengths)), "--rounds", 11,
                *(["--encoder"] if encoder else []), *(["--recorded"] if a.device == "cuda" else [])
            ])
            for row in table(text or ""):
                if row[2] != "birkhoff":
                    continue
                if not row[9]:
                    report.failed(f"{row[0]}, {kind}, L = {row[1]}",
                                  "no dense kernel of LibTorch to compare with")
                    continue
                name, length = row[0], int(row[1])
                forward, both, dense = (float(row[column]) for column in (5, 8, 9))
                (least_forward, least_both), least_dense = KERNELS[name]
                label = f"{name}, {kind}, L = {length}"
                if length in short:
                    report.bar(f"{label}: dense / time", dense, 1)
                    continue
                shares[name, encoder, length, head_dim] = forward, both
                if head_dim <= 128:
                    report.bar(f"{label}: floor / time, forward", forward, least_forward)
                    report.bar(f"{label}: floor / time, forward + backward", both, least_both)
                else:
                    for which, share, of_64 in zip(("forward", "forward + backward"),
                                                   (forward, both), shares[name, encoder, length,
                                                                           64]):
                        report.bar(f"{label}: share at D = 64 / share here, {which}",
                                   of_64 / share,
                                   most=1.3)
                if least_dense and length == lengths[0] and head_dim <= 128:
                    report.bar(f"{label}: dense / time", dense, least_dense[0 if encoder else 1])


def step(a, report):
    small = [] if a.device == "cuda" else [
        "--set", "train.global_batch=1", "--set", "model.layers=1"
    ]
    cuda = ["--set", "train.cuda_graph=true"] if a.device == "cuda" else []
    for model, least in (("lmx_base_dense", 0.40), ("lmx_base_sinkhorn", None)):
        text = report.run(f"Step, {model}", [
            runs.BIRKHOFF, "bench", "step", f"configs/{model}.txtpb", "--vocabulary", 32000,
            "--set", f"device={a.device}", *cuda, *small
        ])
        if text and least:
            report.bar(f"{model}: share of the matrix speed",
                       max(float(row[5]) for row in table(text) if row[0].startswith("step")),
                       least)
    batch, steps, rounds = (64, 60, 2) if a.device == "cuda" else (1, 30, 1)
    for model in ("lmx_base_dense", "lmx_base_sinkhorn"):
        text = report.run(f"Step compared with PyTorch, {model}", [
            sys.executable, HERE / "step_speed.py", "--model", model, "--context", 1024, "--batch",
            batch, "--steps", steps, "--rounds", rounds, "--device", a.device, "--precision",
            "bf16", *([] if a.no_compile else ["--compile"])
        ])
        ours = [
            row for row in table(text or "") if len(row) == 7 and re.fullmatch(r"[\d.]+", row[6])
        ]
        if ours and model == "lmx_base_sinkhorn":
            report.bar(f"{model}: tokens/s / PyTorch compiled", max(float(row[5]) for row in ours),
                       1.15)
        for row in ours:
            report.bar(f"{model}, {row[0]}: loader wait / step time", float(row[6]), most=0.005)
    # Saves are far enough apart that none waits for the previous one.
    saved = ["--steps", 400, "--every", 100] if a.device == "cuda" else ["--steps", steps]
    text = report.run("Stall of a save", [
        sys.executable, HERE / "checkpoint_stall.py", "--config", "configs/lmx_base_sinkhorn.txtpb",
        *saved, "--words", 32000, "--set", f"device={a.device}", "--set",
        f"train.global_batch={batch}"
    ])
    if text:
        report.bar("lmx_base_sinkhorn: stall of a save / step time",
                   float(re.search(r"([\d.]+) of a step", text)[1]),
                   most=0.02)


def loss(a, report):
    """500 steps of the demo's configuration on this repository's own sources."""
    steps = 500 if a.device == "cuda" else 60
    corpus = runs.WORK / "own_sources"
    if not (corpus / "manifest.json").exists():
        corpus.parent.mkdir(parents=True, exist_ok=True)
        folders = [
            runs.ROOT / name
            for name in ("attention", "cluster", "data", "launcher", "models", "runtime")
        ]
        runs.birkhoff("prepare", "--out", corpus, "--tokenizer", "bytes", "--valid", 0.1, *folders)
    means = {}
    for device in ("cpu", a.device):
        rows = runs.train(runs.ROOT / "configs/quickstart.txtpb", runs.WORK / f"demo_{device}", [
            f"data.corpus={corpus}", f"train.steps={steps}", f"device={device}", "metrics.every=1",
            "checkpoint.every=0", "evaluate.every=0", "evaluate.sequences=1"
        ])
        means[device] = statistics.mean(
            row["loss"] for row in rows if "grad_norm" in row and row["step"] > steps - 50)
    report.pages.append(
        f"## Loss of the demo's configuration\n\nMean of the last 50 of {steps} steps on the bytes "
        "of this repository's sources: "
        + ", ".join(f"{device} {mean:.4f}" for device, mean in means.items()) + "\n")
    report.bar(f"demo's loss, difference between {a.device} and CPU in nats",
               abs(means[a.device] - means["cpu"]),
               most=0.02)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build",
                        type=pathlib.Path,
                        default=runs.ROOT / "build/cuda",
                        help="a build of the preset cuda, or a package of one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--parts",
                        type=lambda text: text.split(","),
                        default=PARTS,
                        help=",".join(PARTS))
    parser.add_argument("--no-compile", action="store_true", help="without PyTorch compiled")
    parser.add_argument("--report", type=pathlib.Path, required=True)
    a = parser.parse_args()
    if not set(a.parts) <= set(PARTS):
        parser.error(f"--parts {','.join(a.parts)}: known are {','.join(PARTS)}")
    program = next(
        (each for each in (a.build / "bin/birkhoff", a.build / "birkhoff") if each.exists()), None)
    if program is None:
        parser.error(f"--build {a.build}: no program birkhoff there")
    runs.BIRKHOFF = str(program.resolve())
    os.chdir(runs.ROOT)
    a.build = a.build.resolve()
    report = Report(a.report)
    for part in a.parts:
        before = len(report.bars)
        try:
            globals()[part](a, report)
        except SystemExit as problem:
            report.failed(part, str(problem).replace("\n", " "))
        if len(report.bars) == before:
            report.failed(part, "its commands printed no figure")
    print(f"\n{a.report}")
    sys.exit(any(row[3] != "yes" for row in report.bars))


if __name__ == "__main__":
    main()
