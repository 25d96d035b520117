"""Set transformers and PCTs that count clusters: the class of a set of 32 points in 3 dimensions is
its number of clusters, 2 to 5, and a single point has the same distribution in all classes
(tests/data/point_corpus.h). Accuracy of layers with and without inducing points, with softmax and
with doubly stochastic attention, and of PCT with 2 half-steps and with 6, next to classifiers in
PyTorch that see the points one by one and take a mean: of a network of three layers, followed by
one linear layer or by a network of two.

    python tests/bench/point_clusters.py
    python tests/bench/point_clusters.py --seeds 1 --steps 1000
"""

import argparse
import statistics
import subprocess

import torch

import birkhoff_runs as runs

FOLDER = runs.WORK / "point_clusters"
POINTS, DIMENSIONS, TRAIN, VALID = 32, 3, 60000, 2000
BATCH, RATE = 64, 1e-3
SMALLEST, LARGEST_WITHOUT = 0.95, 0.60
CONFIG = f"""task {{
  point_sets {{ classes: 4 dimensions: {DIMENSIONS} scaling: as_stored }}
}}
data {{ corpus: "{FOLDER}/corpus" sequence_length: {POINTS} }}
model {{ layers: 2 channels: 64 bias: true init: uniform_unit_scaling }}
train {{
  global_batch: {BATCH}
  optimizer {{ adamw {{ beta2: 0.999 weight_decay: 0 }} }}
  schedule {{ learning_rate: {RATE} warmup_steps: 100 final_learning_rate: 0 }}
}}
evaluate {{ every: 0 micro_batch: 100 }}
metrics {{ every: 100 }}
"""


def set_transformer(inducing, half_steps):
    return f"inducing-{inducing}-T-{half_steps}", [
        f"task.point_sets.set_transformer.inducing_points={inducing}",
        f"model.attention.0={{ group {{ mechanism {{ sinkformer {{ half_steps: {half_steps} }} }} "
        "} }"]


def pct(half_steps):
    return f"pct-T-{half_steps}", [
        f"task.point_sets.point_cloud_transformer={{ neighbors: 8 half_steps: {half_steps} "
        "dropout: 0.1 }"]


# The start of a file's name, and settings.
ARMS = {"softmax, all pairs": set_transformer(0, 1),
        "softmax, 16 inducing points": set_transformer(16, 1),
        "5 half-steps, all pairs": set_transformer(0, 5),
        "5 half-steps, 16 inducing points": set_transformer(16, 5),
        "PCT, 2 half-steps": pct(2), "PCT, 6 half-steps": pct(6)}


def corpus():
    """The corpus and the configuration, made only if they are missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "config.txtpb").write_text(CONFIG)
    if not (FOLDER / "corpus/manifest.json").exists():
        program = runs.ROOT / "build/cpu/cluster_sets"
        subprocess.run([program, FOLDER / "corpus", str(POINTS), str(DIMENSIONS), str(TRAIN),
                        str(VALID)], check=True)


def accuracy(arm, seed, steps):
    """Of one run; finished runs are kept."""
    name, settings = ARMS[arm]

    def trained():
        lines = runs.train(FOLDER / "config.txtpb", FOLDER / "run", [
            f"train.steps={steps}", f"train.seed={seed}", *settings])
        return [line["accuracy"] for line in lines if "split" in line][-1]

    return runs.kept(FOLDER, f"{name}-seed-{seed}-steps-{steps}", trained)


def sets(count, generator):
    """Sets and classes by the rule of the corpus."""
    centers = torch.rand(count, 5, DIMENSIONS, generator=generator) * 2 - 1
    while True:
        distances = torch.cdist(centers, centers) + 10 * torch.eye(5)
        close = distances.flatten(1).min(1).values < 0.5
        if not close.any():
            break
        centers[close] = torch.rand(int(close.sum()), 5, DIMENSIONS, generator=generator) * 2 - 1
    clusters = torch.arange(count) % 4 + 2
    of_point = torch.arange(POINTS)[None, :] % clusters[:, None]
    points = torch.gather(centers, 1, of_point[..., None].expand(-1, -1, DIMENSIONS))
    return points + 0.05 * torch.randn(points.shape, generator=generator), clusters - 2


class MeanOfPoints(torch.nn.Module):
    """Each point by itself, then their mean."""

    def __init__(self, after):
        super().__init__()
        linear, relu = torch.nn.Linear, torch.nn.ReLU
        self.before = torch.nn.Sequential(linear(DIMENSIONS, 256), relu(), linear(256, 256), relu(),
                                          linear(256, 256))
        self.after = torch.nn.Sequential(linear(256, 256), relu(), linear(256, 4)) \
            if after else linear(256, 4)

    def forward(self, points):
        return self.after(self.before(points).mean(1))


def accuracy_of_means(after, seed, steps):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    points, classes = sets(TRAIN, generator)
    valid_points, valid_classes = sets(VALID, generator)
    model = MeanOfPoints(after)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(0, TRAIN, (BATCH,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(points[chosen]), classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return (model(valid_points).argmax(-1) == valid_classes).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    corpus()
    print(runs.title())
    print(f"\nPyTorch {torch.__version__}. Accuracy on {VALID} sets in %, by seed, after "
          f"{arguments.steps} steps of {BATCH} sets.\n\n| model | seeds | median |\n|---|---|---|")
    wrong = []

    def row(name, values, fits):
        print(f"| {name} | {', '.join(f'{100 * value:.1f}' for value in values)} | "
              f"{100 * statistics.median(values):.1f} |", flush=True)
        if not all(map(fits, values)):
            wrong.append(name)

    numbers = range(1, arguments.seeds + 1)
    for after, name in ((False, "mean of points, linear (PyTorch)"),
                        (True, "mean of points, network (PyTorch)")):
        row(name, [accuracy_of_means(after, seed, arguments.steps) for seed in numbers],
            lambda value: value <= LARGEST_WITHOUT)
    for arm in ARMS:
        row(arm, [accuracy(arm, seed, arguments.steps) for seed in numbers],
            lambda value: value >= SMALLEST)
    if wrong:
        raise SystemExit(f"out of bounds ({LARGEST_WITHOUT}, {SMALLEST}): {', '.join(wrong)}")


if __name__ == "__main__":
    main()
