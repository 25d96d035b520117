"""Bits per dim of a pixel model on MNIST with four kinds of attention (configs/mnist_pixels.txtpb):
8,000 training images, 2,000 test images. Arms are kept in build/bench/mnist: finished ones are not
repeated, an interrupted one continues. BIRKHOFF_DATA as in mnist_data.py.

    python tests/bench/mnist_pixels.py
    python tests/bench/mnist_pixels.py --config configs/mnist_pixels_smoke.txtpb --steps 300
"""

import argparse
import json
import pathlib
import statistics
import subprocess

import birkhoff_runs as runs
import mnist_data

MECHANISMS = {
    "dense": "dense {}",
    "local": "block_local { block: 56 look_back: 1 }",
    "sinkhorn": "sinkhorn { block: 56 }",
    "routing": None,
}
ROUTING = ("model.attention.0={ group { heads: 2 mechanism { block_local { block: 56 "
           "look_back: 1 } } } group { heads: 2 mechanism { routing { clusters: 14 window: 56 } } "
           "} }")


def result(name, config, steps):
    """Bits per dim on the test images, and ms per step."""
    mechanism = MECHANISMS[name]
    attention = (ROUTING if mechanism is None else
                 f"model.attention.0={{ group {{ mechanism {{ {mechanism} }} }} }}")
    run, lines = runs.train_resumably(config, mnist_data.FOLDER, f"{name}-{steps}", [
        f"data.corpus={mnist_data.corpus()}", attention, f"train.steps={steps}",
        "checkpoint.every=100", f"evaluate.every={steps}"
    ])
    evaluated = json.loads(runs.birkhoff("eval", run, "--split", "test", "--json"))
    found = {
        "bits_per_dim": evaluated["bits_per_dim"],
        "images": evaluated["sequences"],
        "step_ms": statistics.median(line["step_ms"] for line in lines if "split" not in line),
    }
    subprocess.run(["rm", "-rf", str(run)], check=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(runs.ROOT / "configs/mnist_pixels.txtpb"))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--only", nargs="+", default=list(MECHANISMS), choices=MECHANISMS)
    arguments = parser.parse_args()
    print(runs.title())
    print("\n| attention | bits per dim | images | ms per step |\n|---|---|---|---|")
    for name in arguments.only:
        found = runs.kept(
            mnist_data.FOLDER,
            f"pixels-{pathlib.Path(arguments.config).stem}-{name}-{arguments.steps}",
            lambda name=name: result(name, arguments.config, arguments.steps))
        print(f"| {name} | {found['bits_per_dim']:.4f} | {found['images']} | "
              f"{found['step_ms']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
