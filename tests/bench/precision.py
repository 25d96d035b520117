"""bf16 computation against fp32 on a model of 10 million parameters: tokens/s, interleaved, and the
loss at the end of a run.

The script prints tokens per second and tokens per CPU second (without start-up); the latter hardly
depend on other load. The floor is the step's multiply-adds at the machine's matrix speed in each
type, if PyTorch is installed to measure it.
"""

import argparse
import resource
import statistics

import birkhoff_runs as runs

CONFIG = """
task { language_model {} }
model { layers: 6 channels: 384 heads: 6 }
train { optimizer { adamw {} } schedule { learning_rate: 1e-3 warmup_steps: 50 } }
checkpoint { every: 0 } evaluate { every: 0 sequences: 1 micro_batch: 1 } metrics { every: 1
tensorboard: false }
"""
PARAMETERS = 6 * 12 * 384 * 384


def train(config, corpus, precision, context, batch, steps, attention, threads):
    settings = [
        f"data.corpus={corpus}", f"data.sequence_length={context}", f"train.global_batch={batch}",
        f"train.steps={steps}", f"train.precision={precision}"
    ]
    if attention:
        settings.append(f"model.attention=[{{ group {{ mechanism {{ {attention} }} }} }}]")
    return runs.train(config, runs.WORK / f"precision_{precision}", settings, threads=threads)


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def speeds_of(config, corpus, precision, a):
    """(tokens per second, tokens per CPU second) of one run."""
    def used(steps):
        start = processor_seconds()
        rows = train(config, corpus, precision, a.context, a.batch, steps, a.attention, a.threads)
        return processor_seconds() - start, rows

    start, _ = used(1)
    whole, rows = used(a.steps)
    return runs.training_speed(rows), (a.steps - 1) * a.batch * a.context / (whole - start)


def matrix_speed(precision):
    """FLOP/s (multiply-adds times two) of this machine in a type; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    import time

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    processor = open("/proc/cpuinfo").read()
    if "AuthenticAMD" in processor and "avx512bw" in processor and "amx_bf16" not in processor:
        torch.set_float32_matmul_precision(
            "medium")  # oneDNN, which computes in fp32 here; our program chooses it, too
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    times = []
    for _ in range(21):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / statistics.median(times[1:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps",
                        type=int,
                        default=12,
                        help="steps of each round of the speed measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads of the rank; default: all cores")
    parser.add_argument("--loss-steps", type=int, default=500)
    parser.add_argument("--loss-context", type=int, default=64)
    parser.add_argument("--loss-batch", type=int, default=8)
    parser.add_argument("--attention",
                        default="",
                        help="mechanism as configuration text, such as 'sinkhorn { block: 16 }'")
    a = parser.parse_args()
    corpus = runs.prepare(runs.WORK / "shakespeare", runs.shakespeare())
    config = runs.WORK / "precision.txtpb"
    config.write_text(CONFIG)

    speeds = {"fp32": [], "bf16": []}
    for _ in range(a.rounds):
        for precision, figures in speeds.items():
            figures.append(speeds_of(config, corpus, precision, a))
    print(
        f"{PARAMETERS:,} parameters in layers, T={a.context}, batch {a.batch}, "
        f"{a.threads or 'all'} threads"
    )
    for i, unit in enumerate(("second", "CPU second")):
        print(f"  tokens per {unit}")
        for precision, figures in speeds.items():
            values = [figure[i] for figure in figures]
            peak = matrix_speed(precision) if i == 0 else None
            floor = (f"; floor {peak / (6 * PARAMETERS):,.0f} at {peak / 1e9:.0f} GFLOP/s"
                     if peak else "")
            print(
                f"    {precision}: {statistics.median(values):8,.0f} (min {min(values):,.0f}, max "
                f"{max(values):,.0f}){floor}"
            )
        ratios = [bf16[i] / fp32[i] for fp32, bf16 in zip(speeds["fp32"], speeds["bf16"])]
        print(
            f"    ratio bf16 / fp32: {statistics.median(ratios):.2f} (per round: "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)})"
        )

    if a.loss_steps:
        means = {}
        for precision in speeds:
            rows = train(config, corpus, precision, a.loss_context, a.loss_batch, a.loss_steps,
                         a.attention, a.threads)
            losses = [row["loss"] for row in rows if "learning_rate" in row]
            means[precision] = statistics.mean(losses[-50:])
        print(
            f"  loss, mean of the last 50 of {a.loss_steps} steps (T={a.loss_context}, batch "
            f"{a.loss_batch}): fp32 {means['fp32']:.4f}, "
            f"bf16 {means['bf16']:.4f}, difference {means['bf16'] - means['fp32']:+.4f} nats")


if __name__ == "__main__":
    main()
