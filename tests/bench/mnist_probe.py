"""The Sinkformer's probe on MNIST (Sander et al. 2022): one attention block on patches of digits,
with softmax (T = 1) or five half-steps (T = 5), next to the same model in plain PyTorch.

Both begin with the same weights and see the same images in the same order. The script compares the
losses of the first steps in fp64, and then accuracies after training in fp32. (In fp32, losses say
less: with five half-steps and patches of 4, a relative change of all weights by 6e-8 changes
PyTorch's own losses by 7e-4 within 20 steps, because Adam enlarges small gradients.) Finished arms
are kept in build/bench/mnist and not repeated. BIRKHOFF_DATA names the folder that holds MNIST's
10,000 test images (mnist.t10k-images-idx3-ubyte.gz, mnist.t10k-labels-idx1-ubyte.gz): 8,000 of them
train, 2,000 test.

    python tests/bench/mnist_probe.py
    python tests/bench/mnist_probe.py --patches 7 --seeds 1 --epochs 3
"""

import argparse
import functools
import statistics
import subprocess

import torch

import birkhoff_runs as runs
import mnist_data

FOLDER = mnist_data.FOLDER
CONFIG = runs.ROOT / "configs/mnist_patches.txtpb"
SPLITS = mnist_data.SPLITS


def as_configured(value):
    """A number of a configuration, which has fp32."""
    return torch.tensor(value, dtype=torch.float32).item()


BATCH, EPOCHS = 100, 45
MEAN, STD = as_configured(0.1307), as_configured(0.3081)
RATES = {1: 1e-3, 5: 2e-3}
ADAM = {"betas": (as_configured(0.9), as_configured(0.999)), "eps": as_configured(1e-8)}
DTYPES = {"fp32": ("F32", torch.float32), "fp64": ("F64", torch.float64)}
COMPARED_STEPS = 50
LARGEST_DIFFERENCE = 1e-5


@functools.cache
def images():
    """The images [10000, 28, 28] and labels."""
    pixels, labels = (torch.frombuffer(bytearray(data), dtype=torch.uint8)
                      for data in mnist_data.images())
    return pixels.view(-1, 28, 28), labels.long()


def philox(key, counter):
    """Four words of Philox4x32-10 (Salmon et al. 2011), from a 64-bit key and a 128-bit counter."""
    low = 0xFFFFFFFF
    words, keys = [counter >> 32 * i & low for i in range(4)], [key & low, key >> 32]
    for _ in range(10):
        one, two = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            two >> 32 ^ words[1] ^ keys[0], two & low, one >> 32 ^ words[3] ^ keys[1], one & low
        ]
        keys = [keys[0] + 0x9E3779B9 & low, keys[1] + 0xBB67AE85 & low]
    return words


def order(seed, epoch, size):
    """The samples of an epoch in the order of data/loader/sampler.h."""
    words = philox(seed, epoch << 64 | 1)
    key = words[1] << 32 | words[0]
    half = 4
    while 1 << 2 * half < size:
        half += 1
    mask = (1 << half) - 1

    @functools.cache
    def mixed(round_number, right):
        return philox(key, round_number << 64 | right)[0] & mask

    def permuted(value):
        while True:
            left, right = value >> half, value & mask
            for round_number in range(8):
                left, right = right, left ^ mixed(round_number, right)
            value = left << half | right
            if value < size:
                return value

    return [permuted(place) for place in range(size)]


def settings(patch, half_steps, seed, epochs, precision="fp32"):
    steps = SPLITS["train"][1] // BATCH
    return [
        f"train.precision={precision}",
        f"data.corpus={mnist_data.corpus()}",
        f"data.sequence_length={(28 // patch) ** 2 + 1}",
        f"task.image_classification.patch={patch}",
        f"model.attention.0.group.0.mechanism.sinkformer.half_steps={half_steps}",
        f"train.seed={seed}",
        f"train.steps={steps * epochs}",
        f"train.schedule.learning_rate={RATES[half_steps]}",
        f"train.schedule.decay_epoch={list(decays(epochs))}",
        "checkpoint.every=0",
        f"evaluate.every={steps * epochs}",
        "metrics.every=1",
        "watchdog.seconds=600",
    ]


def decays(epochs):
    """The epochs at which the rate falls: 35 and 41 of 45."""
    first = max(1, round(35 * epochs / EPOCHS))
    return first, max(first + 1, round(41 * epochs / EPOCHS))


def initial_weights(arm, run, precision):
    """The weights before the first step: those of a run whose steps change nothing."""
    runs.train(CONFIG, run, [
        *settings(*arm, precision), "train.steps=1", "train.schedule.learning_rate=0",
        "evaluate.every=0"
    ])
    kind, dtype = DTYPES[precision]
    weights = {}
    for path in runs.newest_checkpoint(run).glob("model-*.safetensors"):
        for name, (found, shape, data) in runs.read_safetensors(path).items():
            assert found == kind, name
            values = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
            weights[name] = values.clone().requires_grad_()
    return weights


def forward(weights, pixels, patch, half_steps):
    """The logits [B, 10]."""
    w = weights
    side = 28 // patch
    x = (pixels.to(w["output.weight"].dtype) / 255 - MEAN) / STD
    x = x.view(-1, side, patch, side, patch).transpose(2, 3).reshape(-1, side * side, patch * patch)
    x = torch.nn.functional.linear(x, w["embedding.weight"], w["embedding.bias"])
    x = torch.cat([w["embedding.class_token"].expand(len(x), 1, -1), x], 1) + w["positions.weight"]

    def norm(y, name):
        return torch.nn.functional.layer_norm(y, y.shape[-1:], w[f"{name}.weight"],
                                              w[f"{name}.bias"], 1e-5)

    block = "blocks.0.attention"
    q, k, v = torch.nn.functional.linear(norm(x, f"{block}_norm"),
                                         w[f"{block}.query_key_value.weight"],
                                         w[f"{block}.query_key_value.bias"]).chunk(3, -1)
    scores = q @ k.transpose(1, 2) / q.shape[-1]**0.5
    for step in range(half_steps):
        scores = scores - scores.logsumexp(-1 - step % 2, keepdim=True)
    x = x + torch.nn.functional.linear(scores.exp() @ v, w[f"{block}.output.weight"],
                                       w[f"{block}.output.bias"])
    return torch.nn.functional.linear(norm(x[:, 0], "final_norm"), w["output.weight"],
                                      w["output.bias"])


def train_pytorch(weights, patch, half_steps, seed, epochs, steps=None):
    """Yields the losses of all steps, or of some."""
    pixels, labels = images()
    begin, end = SPLITS["train"]
    rate = as_configured(RATES[half_steps])
    optimizer = torch.optim.Adam(list(weights.values()), lr=rate, **ADAM)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.1**sum(epoch >= at for at in decays(epochs))
        samples = torch.tensor(order(seed, epoch, end - begin)) + begin
        for batch in samples.split(BATCH)[:steps]:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                forward(weights, pixels[batch], patch, half_steps), labels[batch])
            loss.backward()
            optimizer.step()
            yield loss.item()


def accuracy_of(weights, patch, half_steps):
    pixels, labels = images()
    begin, end = SPLITS["test"]
    with torch.no_grad():
        logits = forward(weights, pixels[begin:end], patch, half_steps)
    return (logits.argmax(1) == labels[begin:end]).float().mean().item()


def difference(patch, half_steps, seed):
    """The largest difference of the losses of the first steps."""
    arm, run = (patch, half_steps, seed, 1), FOLDER / "run"
    weights = initial_weights(arm, run, "fp64")
    lines = runs.train(CONFIG, run, [
        *settings(*arm, "fp64"), f"train.steps={COMPARED_STEPS}", "evaluate.every=0"])
    losses = [line["loss"] for line in lines if "split" not in line]
    found = max(abs(ours - peer) for ours, peer in zip(
        losses, train_pytorch(weights, *arm, steps=COMPARED_STEPS), strict=True))
    subprocess.run(["rm", "-rf", str(run)], check=True)
    return found


def accuracies(patch, half_steps, seed, epochs):
    """Ours and PyTorch's."""
    arm, run = (patch, half_steps, seed, epochs), FOLDER / "run"
    weights = initial_weights(arm, run, "fp32")
    lines = runs.train(CONFIG, run, settings(*arm))
    ours = [line["accuracy"] for line in lines if "split" in line][-1]
    for _ in train_pytorch(weights, *arm):
        pass
    subprocess.run(["rm", "-rf", str(run)], check=True)
    return ours, accuracy_of(weights, patch, half_steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patches", type=int, nargs="+", default=[2, 4, 7, 14])
    parser.add_argument("--half-steps", type=int, nargs="+", default=[1, 5], choices=RATES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="0: only compare losses")
    arguments = parser.parse_args()
    print(runs.title())
    print(f"\nPyTorch {torch.__version__}. Accuracy on 2,000 images in %, mean of "
          f"{arguments.seeds} seeds, after {arguments.epochs} epochs of 8,000. Difference: the "
          f"largest of the losses of the first {COMPARED_STEPS} steps in fp64, in nats.\n")
    print("| patch | T | Birkhoff | PyTorch | difference |\n|---|---|---|---|---|")
    apart = []
    for patch in arguments.patches:
        for half_steps in arguments.half_steps:
            arms = [(patch, half_steps, seed) for seed in range(1, arguments.seeds + 1)]
            name = "patch{}-T{}-seed{}".format
            most = max(runs.kept(FOLDER, f"first-{name(*arm)}", lambda arm=arm: difference(*arm))
                       for arm in arms)
            cells = ["", ""]
            if arguments.epochs > 0:
                found = [
                    runs.kept(FOLDER, f"probe-{name(*arm)}-epochs{arguments.epochs}",
                              lambda arm=arm: accuracies(*arm, arguments.epochs)) for arm in arms
                ]
                cells = [f"{100 * statistics.mean(side):.2f}" for side in zip(*found)]
            print(f"| {patch} | {half_steps} | {' | '.join(cells)} | {most:.1e} |", flush=True)
            if most > LARGEST_DIFFERENCE:
                apart.append((patch, half_steps))
    if apart:
        raise SystemExit(f"losses differ by more than {LARGEST_DIFFERENCE}: (patch, T) {apart}")


if __name__ == "__main__":
    main()
