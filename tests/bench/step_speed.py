"""Tokens/s of a training step, ours with its loader against PyTorch's without one, interleaved in
one run; by default for the baby GPT on the CPU.

First, the same weights and the same batch must give the same loss and the same gradient norm. Then
rounds alternate. The script prints medians and ratios as a Markdown table, with the loader wait as
a fraction of the step. On CPUs PyTorch has two threads; ours is one rank with two threads, and two
ranks with one thread each. On a GPU ours is one rank, without and with recorded steps
(train.cuda_graph). The floor is the FLOPs of a step (only the causal half of attention, no input
embedding) at the matrix speed that PyTorch reaches in the same run. `birkhoff bench step` shows
where the time goes.

    python tests/bench/step_speed.py
    python tests/bench/step_speed.py --model lmx_base_sinkhorn --context 1024 --batch 64 \\
      --device cuda --precision bf16 --compile
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys

import birkhoff_runs as runs
import pytorch_gpt

# Relative tolerances of the first loss and of the gradient norm: sums of thousands of terms in
# fp32, or of terms rounded to bf16 (2^-9) in different places.
AGREEMENT = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 3e-2)}


def settings_of(a, context, batch):
    return [
        f"data.sequence_length={context}", f"train.global_batch={batch}",
        f"train.precision={a.precision}", f"device={a.device}"
    ]


def first_step(a, context, batch):
    """((loss, gradient norm) of ours, of PyTorch) for a corpus of exactly one batch of letters,
    with our initial weights in both."""
    import torch

    text = runs.random_text(runs.LETTERS, "", batch * context + 1)
    folder = runs.WORK / f"one_batch_{context}"
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(text)
    corpus = runs.prepare(folder / "corpus", folder / "text.txt", valid=0)
    rows = runs.train(runs.ROOT / f"configs/{a.model}.txtpb", folder / "run", [
        f"data.corpus={corpus}", "train.steps=1", "train.schedule.learning_rate=0",
        "train.schedule.final_learning_rate=0", "metrics.every=1", *settings_of(a, context, batch)
    ])
    weights = runs.read_safetensors(
        sorted(runs.newest_checkpoint(folder / "run").glob("model-*.safetensors"))[0])

    def tensor(name):
        _, shape, data = weights[name]
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)

    model = pytorch_gpt.GPT(len(runs.LETTERS), context, **pytorch_gpt.MODELS[a.model])
    model.load(tensor)
    model.to(a.device)
    index = {c: i for i, c in enumerate(sorted(runs.LETTERS))}
    tokens = torch.tensor([index[c] for c in text], device=a.device)
    loss, norm = pytorch_gpt.train_step(model, pytorch_gpt.optimizer(model, 0),
                                        tokens[:-1].view(batch, context),
                                        tokens[1:].view(batch, context), 0, a.precision)
    return (rows[0]["loss"], rows[0]["grad_norm"]), (loss.item(), norm.item())


def ours(a, corpus, context, ranks, threads, more):
    """{tokens_per_second, wait: loader wait / step time, flops: per token}"""
    run = runs.WORK / "speed_run"
    rows = runs.train(
        runs.ROOT / f"configs/{a.model}.txtpb",
        run, [
            f"data.corpus={corpus}", f"train.steps={a.steps}",
            f"metrics.every={max(1, a.steps // 10)}", "metrics.tensorboard=false",
            "evaluate.sequences=1", "checkpoint.every=0", *settings_of(a, context, a.batch), *more
        ],
        ranks=ranks,
        threads=threads)
    steps = [row for row in rows if "tokens_per_second" in row][2:]
    flops = re.search(r"a token in training +([\d.e+]+) FLOP", runs.birkhoff("inspect", run))
    return {
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steps),
        "wait": statistics.mean(row["loader_wait_ms"] / row["step_ms"] for row in steps),
        "flops": float(flops[1])
    }


def pytorch(a, context, compiled):
    script = pathlib.Path(__file__).with_name("pytorch_gpt.py")
    line = [
        sys.executable, script, "--model", a.model, "--context", context, "--batch", a.batch,
        "--steps", a.steps, "--device", a.device, "--precision", a.precision
    ]
    if not pytorch_gpt.MODELS[a.model].get("words"):
        line += ["--text", runs.random_corpus().parent / "text.txt"]
    done = subprocess.run([*map(str, line), *(["--compile"] if compiled else [])],
                          capture_output=True,
                          text=True)
    if done.returncode:
        raise SystemExit(
            f"PyTorch{', compiled' if compiled else ''}: exit "
            f"{done.returncode}\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout)


def candidates(a, corpus, context):
    result = {"PyTorch eager": lambda: pytorch(a, context, False)}
    if a.compile:
        result["PyTorch compiled"] = lambda: pytorch(a, context, True)
    if a.device == "cuda":
        result["Birkhoff"] = lambda: ours(a, corpus, context, None, None, [])
        result["Birkhoff, recorded steps"] = lambda: ours(a, corpus, context, None, None,
                                                          ["train.cuda_graph=true"])
    else:
        result["1 rank x 2 threads"] = lambda: ours(a, corpus, context, None, 2, [])
        result["2 ranks x 1 thread"] = lambda: ours(a, corpus, context, 2, 1, [])
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model",
                        choices=pytorch_gpt.MODELS,
                        default="baby_gpt_dense",
                        help="a model of configs/")
    parser.add_argument("--context", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=AGREEMENT, default="fp32")
    parser.add_argument("--compile", action="store_true", help="also run PyTorch compiled")
    a = parser.parse_args()
    if a.steps < 30:
        parser.error(f"--steps {a.steps}: must be at least 30, because the first fifth is warm-up")
    corpus = runs.random_corpus(pytorch_gpt.MODELS[a.model].get("words"))
    print(runs.title())
    for context in a.context:
        mine, theirs = first_step(a, context, min(a.batch, 12))
        for name, x, y, tolerance in zip(("losses", "gradient norms"), mine, theirs,
                                         AGREEMENT[a.precision]):
            if not math.isclose(x, y, rel_tol=tolerance):
                raise SystemExit(f"T={context}: first {name} differ: ours {x}, PyTorch {y}")
        names = candidates(a, corpus, context)
        results = {name: [] for name in names}
        for _ in range(a.rounds):
            for name, run in names.items():
                results[name].append(run())
        peer = "PyTorch compiled" if a.compile else "PyTorch eager"
        median = {
            name: statistics.median(each["tokens_per_second"] for each in values)
            for name, values in results.items()
        }
        matrix = statistics.median(each["matrix_speed"] for each in results["PyTorch eager"])
        flops = next(
            each["flops"] for values in results.values() for each in values if "flops" in each)
        print(
            f"\n{a.model}, T={context}, batch {a.batch}, {a.precision}: first loss ours "
            f"{mine[0]:.6f}, PyTorch {theirs[0]:.6f}; gradient norm "
            f"{mine[1]:.5f}, {theirs[1]:.5f}. Medians of {a.rounds} interleaved rounds of "
            f"{a.steps} steps. Floor: {flops / 1e6:.2f} MFLOP per token at "
            f"{matrix / 1e9:,.0f} GFLOP/s, {matrix / flops:,.0f} tokens/s.\n")
        print(
            f"| | tokens/s | min | max | speed / floor | ratio to {peer} | loader wait / step time "
            "|\n|---|---:|---:|---:|---:|---:|---:|"
        )
        for name, values in results.items():
            speeds = [each["tokens_per_second"] for each in values]
            wait = f"{statistics.median(each['wait'] for each in values):.5f}" if "wait" in values[
                0] else ""
            print(
                f"| {name} | {median[name]:,.0f} | {min(speeds):,.0f} | {max(speeds):,.0f} | "
                f"{median[name] * flops / matrix:.4f} "
                f"| {median[name] / median[peer]:.4f} | {wait} |",
                flush=True)


if __name__ == "__main__":
    main()
