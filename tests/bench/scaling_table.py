"""Predicted speed of large models on 8 to 4,096 GPUs: `birkhoff plan` for each number of ranks.
The batch grows with the data-parallel ranks. Prints one table per model.

    python tests/bench/scaling_table.py

Measured: nothing but --tflops, the speed of one H100 in a training step (docs/benchmarks/gpu.md).
From data sheets: 450 GB/s of NVLink for each GPU, 400 Gbit/s of network for each GPU, eight GPUs a
node. Assumed: the share of both that transfers reach, and latencies.
"""

import argparse
import json
import textwrap

import birkhoff_runs as runs

NODES = ["mesh.ranks_per_node=8", "train.bucket_elements=16777216"]
TEN_BILLION = [
    "model.layers=48", "model.channels=4096", "model.heads=32", "model.feed_forward=16384",
    "data.sequence_length=4096", "model.attention=[]", "train.recompute=true"
]
# Name, configuration, vocabulary, sequences of a data-parallel rank, settings.
MODELS = [
    ("Routing Transformer, enwik8", "routing_enwik8_paper", 256, 4, NODES),
    ("The same at one level", "routing_enwik8_paper", 256, 4, []),
    ("Routing Transformer, Wikitext-103", "routing_wikitext103_paper", 267735, 8, NODES),
    ("Sparse Sinkhorn, LM1B base", "lmx_base_sinkhorn", 32000, 128, NODES),
    ("10 billion, dense, ZeRO-3 inside nodes", "lmx_base_dense", 32000, 2,
     [*TEN_BILLION, *NODES, "train.zero_stage=3", "mesh.zero_inside_nodes=true"]),
    ("10 billion, dense, ZeRO-3 over all ranks", "lmx_base_dense", 32000, 2,
     [*TEN_BILLION, "train.zero_stage=3", "train.bucket_elements=67108864"]),
    ("10 billion, dense, tensor 8, ZeRO-1", "lmx_base_dense", 32000, 16,
     [*TEN_BILLION, "mesh.tensor=8", "train.zero_stage=1", "train.bucket_elements=16777216"]),
]
NODE = 8


def plan(config, vocabulary, ranks, sequences, settings, a):
    tensor = next((int(each.split("=")[1]) for each in settings if "mesh.tensor" in each), 1)
    arguments = ["plan", runs.ROOT / f"configs/{config}.txtpb", "--json", "--ranks", ranks,
                 "--ranks-per-node", NODE, "--vocabulary", vocabulary, "--peak-tflops", a.tflops,
                 "--network-gbs", a.network, "--network-us", a.network_us, "--node-gbs", a.node,
                 "--node-us", a.node_us]
    for setting in [*settings, "device=cuda", "train.precision=bf16", "mesh.data=0",
                    f"train.global_batch={ranks // tensor * sequences}"]:
        arguments += ["--set", setting]
    return json.loads(runs.birkhoff(*arguments))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+",
                        default=[8, 16, 64, 256, 1024, 4096])
    parser.add_argument("--tflops", type=float, default=330, help="of a GPU's passes")
    parser.add_argument("--node", type=float, default=0.8 * 450, help="GB/s of a GPU to its node")
    parser.add_argument("--node-us", type=float, default=10)
    parser.add_argument("--network", type=float, default=0.8 * 8 * 50, help="GB/s of a node")
    parser.add_argument("--network-us", type=float, default=20)
    a = parser.parse_args()
    print(runs.title())
    for name, config, vocabulary, sequences, settings in MODELS:
        described = f"{name}: {' '.join(settings) or 'as in configs/' + config + '.txtpb'}"
        print(f"\n{textwrap.fill(described, 100, break_on_hyphens=False)}\n")
        print("| GPUs | tokens a step | state of a GPU, GB | ms a step | exposed, ms | "
              "million tokens/s | efficiency |")
        print("|---:|" + "---:|" * 6)
        for ranks in a.ranks:
            found = plan(config, vocabulary, ranks, sequences, settings, a)
            memory = found["memory"]
            state = sum(memory[part]["configured"]
                        for part in ("values", "gradients", "optimizer_state"))
            time = {part: row["seconds"] for part, row in found["time"].items()}
            tokens = found["speed"]["tokens"]["per_second"]
            computation = time["forward"] + time["backward"]
            print(f"| {ranks:,} | {tokens * time['step']:,.0f} | {state / 1e9:.2f} | "
                  f"{time['step'] * 1e3:.1f} | {(time['step'] - computation) * 1e3:.1f} | "
                  f"{tokens / 1e6:.2f} | {computation / time['step']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
