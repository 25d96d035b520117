"""Tokens/s of a training step of the baby GPT (fp32, dense), ours against PyTorch eager, interleaved in one run.

First the same weights and the same batch must give the same first loss. Then rounds alternate: PyTorch with two threads,
ours as one rank with two threads and as two ranks with one thread each; medians and ratios are printed as a table in
Markdown. The floor is the multiply-adds of the step at the machine's fp32 matrix speed, measured in the same run. Where the
time of our step goes: `birkhoff bench step`.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time

import birkhoff_runs as runs


def first_losses(context, batch):
    """(ours, PyTorch's) loss of the first batch: a corpus of exactly one batch, and our initial weights in both."""
    import torch

    import pytorch_gpt

    text = runs.shakespeare().read_text()[: batch * context + 1]
    folder = runs.WORK / f"one_batch_{context}"
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(text)
    corpus = runs.prepare(folder / "corpus", folder / "text.txt", valid=0)
    rows = runs.train(runs.ROOT / "configs/baby_gpt_dense.txtpb", folder / "run",
                      [f"data.corpus={corpus}", f"data.sequence_length={context}", f"train.global_batch={batch}", "train.steps=1",
                       "train.schedule.learning_rate=0", "train.schedule.final_learning_rate=0", "metrics.every=1"])
    ours = rows[0]["loss"]
    weights = runs.read_safetensors(sorted(runs.newest_checkpoint(folder / "run").glob("model-*.safetensors"))[0])
    characters = sorted(set(text))
    model = pytorch_gpt.GPT(len(characters), context)

    def tensor(name):
        _, shape, data = weights[name]
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)

    with torch.no_grad():
        model.embedding.weight.copy_(tensor("embedding.weight"))
        model.positions.weight.copy_(tensor("positions.weight"))
        model.norm.weight.copy_(tensor("final_norm.weight"))
        for i, block in enumerate(model.blocks):
            for ours_name, parameter in (("attention_norm.weight", block.norm1.weight), ("attention.query_key_value.weight", block.qkv.weight),
                                         ("attention.output.weight", block.output.weight), ("feed_forward_norm.weight", block.norm2.weight),
                                         ("feed_forward.up.weight", block.up.weight), ("feed_forward.down.weight", block.down.weight)):
                parameter.copy_(tensor(f"blocks.{i}.{ours_name}"))
        index = {c: i for i, c in enumerate(characters)}
        tokens = torch.tensor([index[c] for c in text])
        theirs = model(tokens[:-1].view(batch, context), tokens[1:].view(batch, context)).item()
    return ours, theirs


def ours_speed(corpus, context, batch, steps, ranks, threads):
    rows = runs.train(runs.ROOT / "configs/baby_gpt_dense.txtpb", runs.WORK / "speed_run",
                      [f"data.corpus={corpus}", f"data.sequence_length={context}", f"train.global_batch={batch}", f"train.steps={steps}",
                       "metrics.every=20", "evaluate.sequences=1", "checkpoint.every=0"], ranks=ranks, threads=threads)
    return runs.training_speed(rows)


def pytorch_speed(context, batch, steps):
    script = pathlib.Path(__file__).with_name("pytorch_gpt.py")
    done = subprocess.run([sys.executable, script, "--text", runs.shakespeare(), "--context", str(context), "--batch", str(batch),
                           "--steps", str(steps)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["tokens_per_second"]


def matrix_speed():
    """fp32 multiply-adds a second of this machine, times two."""
    import torch

    torch.set_num_threads(2)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    a @ b
    times = []
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * 1024 ** 3 / statistics.median(times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    print(runs.title())
    for context in arguments.context:
        ours, theirs = first_losses(context, arguments.batch)
        if not math.isclose(ours, theirs, rel_tol=1e-5):
            raise SystemExit(f"T={context}: first losses differ: ours {ours}, PyTorch {theirs}")
        figures = {"PyTorch eager, 2 threads": [], "1 rank x 2 threads": [], "2 ranks x 1 thread": []}
        for _ in range(arguments.rounds):
            figures["PyTorch eager, 2 threads"].append(pytorch_speed(context, arguments.batch, arguments.steps))
            figures["1 rank x 2 threads"].append(ours_speed(corpus, context, arguments.batch, arguments.steps, None, 2))
            figures["2 ranks x 1 thread"].append(ours_speed(corpus, context, arguments.batch, arguments.steps, 2, 1))
        peer = statistics.median(figures["PyTorch eager, 2 threads"])
        parameters = 4 * 12 * 128 * 128 + 65 * 128
        flops = 6 * parameters + 4 * 6 * context * 128  # a token: projections and MLP, plus causal attention (half of 12 T C a layer)
        speed = matrix_speed()
        print(f"\nT={context}, batch {arguments.batch}: first loss ours {ours:.6f}, PyTorch {theirs:.6f}. Medians of {arguments.rounds} interleaved "
              f"rounds of {arguments.steps} steps. Floor: {flops / 1e6:.2f} MFLOP a token at {speed / 1e9:.0f} GFLOP/s, {speed / flops:,.0f} tokens/s.\n")
        print("| | tokens/s | min | max | of the floor's speed | ratio to PyTorch |\n|---|---:|---:|---:|---:|---:|")
        for name, values in figures.items():
            middle = statistics.median(values)
            print(f"| {name} | {middle:,.0f} | {min(values):,.0f} | {max(values):,.0f} | {middle * flops / speed:.4f} | {middle / peer:.4f} |")


if __name__ == "__main__":
    main()
