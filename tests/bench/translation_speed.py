"""Tokens/s of training and decoding with the encoder-decoder of configs/multi30k_dense.txtpb.

The peer is PyTorch's nn.Transformer of the same size, eager, with fused AdamW. The same weights
must first give both sides the same loss of one batch. Then rounds alternate. Batches are 64 pairs
of random sentences, padded to the longest; padding does not count. Neither side has dropout,
because nn.Transformer has it in other places.

The second table has the normalizers of Zhao et al. 2019 ("Explicit Sparse Transformer", table 4) in
all attention of the model, trained and decoded by the program alone: greedy, in batches of 64, the
time of many lines less the time of few. Random weights with an output table of their own generate
texts, because a model that was trained on random sentences ends them at once.

    python tests/bench/translation_speed.py
    python tests/bench/translation_speed.py --only normalizers    # needs no PyTorch
"""

import argparse
import json
import math
import random
import statistics
import time

import birkhoff_runs as runs

CONFIG = runs.ROOT / "configs/multi30k_dense.txtpb"
FOLDER = runs.WORK / "translation_speed"
FIRST_SYMBOL, SYMBOLS, BATCH, LONGEST, SMOOTHING = 0x4E00, 6000, 64, 24, 0.1
# Relative tolerance of the first loss: sums of thousands of terms in fp32.
AGREEMENT = 1e-5
NORMALIZERS = ["softmax", "sparsemax", "entmax15", "entmax", "top_k"]


def sentences(draw, count):
    def sentence():
        length = draw.randint(6, LONGEST)
        return "".join(chr(FIRST_SYMBOL + draw.randrange(SYMBOLS)) for _ in range(length))

    return [sentence() for _ in range(count)]


def corpus(name, count, seed):
    """A corpus of pairs, and the pairs as lists of ids with end marks."""
    folder = FOLDER / name
    draw = random.Random(seed)
    sides = [sentences(draw, count), sentences(draw, count)]
    if not (folder / "manifest.json").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        paths = [FOLDER / f"{name}.{side}" for side in ("source", "target")]
        for path, lines in zip(paths, sides):
            path.write_text("".join(line + "\n" for line in lines))
        runs.birkhoff("prepare", "--out", folder, "--tokenizer", "chars", "--valid", 0, "--train",
                      paths[0], "--target", paths[1])
    # Ids of characters are in the order of their code points, and the end mark follows them.
    symbols = sorted(set("".join(sides[0] + sides[1])))
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    manifest = json.loads((folder / "manifest.json").read_text())
    end = int(manifest["tokenizer"]["end_of_document"])
    return folder, [[[ids[symbol] for symbol in line] + [end] for line in side]
                    for side in sides], end


def training(steps):
    return [
        "train.batch_tokens=0", f"train.global_batch={BATCH}", f"train.steps={steps}",
        f"checkpoint.every={steps}", "evaluate.every=0", "model.dropout.embedding=0",
        "model.dropout.residual=0", "metrics.every=10"
    ]


class Peer:
    def __init__(self, weights):
        """weights: name -> tensor of a checkpoint."""
        import torch

        self.table = weights["encoder.embedding.weight"].clone().requires_grad_()
        channels = self.table.shape[1]
        hidden = weights["blocks.0.feed_forward.up.weight"].shape[0]
        layers = sum(name.endswith(".cross_attention_norm.weight") for name in weights)
        self.model = torch.nn.Transformer(channels, 4, layers, layers, hidden, dropout=0.0,
                                          batch_first=True, norm_first=True)
        state = {}

        def linear(name, *parts):
            for kind in ("weight", "bias"):
                yield kind, torch.cat([weights[f"{part}.{kind}"] for part in parts])

        def attention(name, *parts, output):
            for kind, value in linear(name, *parts):
                state[f"{name}.in_proj_{kind}"] = value
            for kind, value in linear(name, output):
                state[f"{name}.out_proj.{kind}"] = value

        def copy(name, part):
            for kind, value in linear(name, part):
                state[f"{name}.{kind}"] = value

        for side, prefix in (("encoder", "encoder."), ("decoder", "")):
            for i in range(layers):
                ours, theirs = f"{prefix}blocks.{i}", f"{side}.layers.{i}"
                attention(f"{theirs}.self_attn", f"{ours}.attention.query_key_value",
                          output=f"{ours}.attention.output")
                copy(f"{theirs}.norm1", f"{ours}.attention_norm")
                if side == "decoder":
                    cross = f"{ours}.cross_attention"
                    attention(f"{theirs}.multihead_attn", f"{cross}.query", f"{cross}.key_value",
                              output=f"{cross}.output")
                    copy(f"{theirs}.norm2", f"{ours}.cross_attention_norm")
                copy(f"{theirs}.norm{3 if side == 'decoder' else 2}", f"{ours}.feed_forward_norm")
                copy(f"{theirs}.linear1", f"{ours}.feed_forward.up")
                copy(f"{theirs}.linear2", f"{ours}.feed_forward.down")
            copy(f"{side}.norm", f"{prefix}final_norm")
        self.model.load_state_dict(state)
        half = channels // 2
        angles = torch.arange(64)[:, None] * torch.exp(
            -math.log(1e4) / (half - 1) * torch.arange(half))
        self.positions = torch.cat([angles.sin(), angles.cos()], 1)
        self.optimizer = torch.optim.AdamW([self.table, *self.model.parameters()], lr=1e-4,
                                           betas=(0.9, 0.98), weight_decay=1e-4, fused=True)

    def embed(self, ids):
        import torch

        x = torch.nn.functional.embedding(ids, self.table) * math.sqrt(self.table.shape[1])
        return x + self.positions[:ids.shape[1]]

    def loss(self, batch, smoothing):
        import torch

        sources, hidden, previous, targets, causal = batch
        x = self.model(self.embed(sources), self.embed(previous), tgt_mask=causal,
                       src_key_padding_mask=hidden, memory_key_padding_mask=hidden,
                       tgt_is_causal=True)
        return torch.nn.functional.cross_entropy((x @ self.table.T).flatten(0, 1),
                                                 targets.flatten(), ignore_index=-1,
                                                 label_smoothing=smoothing)

    def step(self, batch):
        import torch

        self.optimizer.zero_grad()
        self.loss(batch, SMOOTHING).backward()
        torch.nn.utils.clip_grad_norm_([self.table, *self.model.parameters()], 1.0)
        self.optimizer.step()


def batch_of(sources, targets, end):
    """Padded tensors, and the number of tokens."""
    import torch

    def padded(rows, value):
        longest = max(map(len, rows))
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    source = padded(sources, 0)
    lengths = torch.tensor([len(row) for row in sources])
    hidden = torch.arange(source.shape[1]) >= lengths[:, None]
    previous = padded([[end] + row[:-1] for row in targets], end)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(previous.shape[1])
    return ((source, hidden, previous, padded(targets, -1), causal),
            sum(map(len, sources)) + sum(map(len, targets)))


def weights_of(run):
    import torch

    found = {}
    for file in runs.newest_checkpoint(run).glob("model*.safetensors"):
        for name, (_, shape, data) in runs.read_safetensors(file).items():
            found[name] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
    return found


def compare_first_loss(threads):
    folder, (sources, targets), end = corpus("one_batch", BATCH, seed=2)
    run = FOLDER / "first"
    lines = runs.train(CONFIG, run, [
        f"data.corpus={folder}", *training(1), "metrics.every=1", "train.schedule.learning_rate=0",
        "train.optimizer.adamw.weight_decay=0"], threads=threads)
    ours = next(line["loss"] for line in lines if "split" not in line)
    batch, _ = batch_of(sources, targets, end)
    peer = Peer(weights_of(run)).loss(batch, 0).item()
    print(f"first loss: {ours:.6f}, of PyTorch {peer:.6f}")
    if abs(ours - peer) > AGREEMENT * peer:
        raise SystemExit("the two sides do not compute the same loss")


def train(folder, name, steps, threads, settings=()):
    """Tokens/s after the first steps, and the run."""
    run = FOLDER / name
    lines = runs.train(CONFIG, run, [f"data.corpus={folder}", *training(steps), *settings],
                       threads=threads)
    return runs.training_speed([line for line in lines if "split" not in line], skip=1), run


def compare_training(a):
    import torch

    torch.set_num_threads(a.threads)
    compare_first_loss(a.threads)
    folder, (sources, targets), end = corpus("corpus", 4096, seed=1)
    run = FOLDER / "untrained"
    runs.train(CONFIG, run, [f"data.corpus={folder}", *training(1)], threads=a.threads)
    peer = Peer(weights_of(run))
    batches = [batch_of(sources[i:i + BATCH], targets[i:i + BATCH], end)
               for i in range(0, BATCH * a.steps, BATCH)]
    speeds = {"nn.Transformer": [], "birkhoff": []}
    for _ in range(a.rounds):
        times = []
        for batch, tokens in batches:
            start = time.perf_counter()
            peer.step(batch)
            times.append(tokens / (time.perf_counter() - start))
        speeds["nn.Transformer"].append(statistics.median(times[2:]))
        speeds["birkhoff"].append(train(folder, "training", a.steps, a.threads)[0])
    base = statistics.median(speeds["nn.Transformer"])
    print("\n| training | tokens/s | of nn.Transformer |\n|---|---:|---:|")
    for name, values in speeds.items():
        print(f"| {name} | {statistics.median(values):,.0f} | "
              f"{statistics.median(values) / base:.2f} |", flush=True)


def compare_normalizers(a):
    folder, _, _ = corpus("corpus", 4096, seed=1)
    lines = (FOLDER / "corpus.source").read_text().splitlines(keepends=True)
    for name, count in (("few", BATCH), ("many", BATCH * a.decoded)):
        (FOLDER / f"{name}.txt").write_text("".join(lines[:count]))

    def decode(run, name, count):
        start = time.perf_counter()
        found = runs.birkhoff("generate", run, "--input", FOLDER / f"{name}.txt", "--beam", 1,
                              "--batch", BATCH, "--max-tokens", LONGEST, "--json",
                              threads=a.threads)
        seconds = time.perf_counter() - start
        tokens = sum(json.loads(line)["tokens"] for line in found.splitlines())
        if tokens < 0.9 * LONGEST * count:
            raise SystemExit(f"{run}: {count} texts end after {tokens} tokens")
        return seconds, tokens

    speeds = {name: ([], []) for name in NORMALIZERS}
    for _ in range(a.rounds):
        for name in NORMALIZERS:
            mechanism = "{group{mechanism{dense{normalizer:%s}}}}" % name
            settings = [f"model.attention.0={mechanism}", f"model.encoder.attention.0={mechanism}",
                        f"model.encoder.cross_attention.0={mechanism}"]
            speed, _ = train(folder, "normalizer", a.steps, a.threads, settings)
            run = FOLDER / "random"
            runs.train(CONFIG, run, [f"data.corpus={folder}", *training(1), *settings,
                                     "train.schedule.learning_rate=0",
                                     "model.tie_embeddings=false"], threads=a.threads)
            few, many = decode(run, "few", BATCH), decode(run, "many", BATCH * a.decoded)
            speeds[name][0].append(speed)
            speeds[name][1].append((many[1] - few[1]) / (many[0] - few[0]))
    print("\n| attention | training tokens/s | of softmax | decoding tokens/s | of softmax |\n"
          "|---|---:|---:|---:|---:|")
    bases = [statistics.median(values) for values in speeds["softmax"]]
    for name, columns in speeds.items():
        cells = [f"{statistics.median(values):,.0f} | {statistics.median(values) / base:.2f}"
                 for values, base in zip(columns, bases)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--decoded", type=int, default=16, help="batches to decode")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    tables = {"training": compare_training, "normalizers": compare_normalizers}
    parser.add_argument("--only", choices=tables, nargs="+", default=list(tables))
    a = parser.parse_args()
    print(runs.title() + "\n")
    for table in a.only:
        tables[table](a)


if __name__ == "__main__":
    main()
