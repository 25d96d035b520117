"""Generated tokens/s of `birkhoff generate` with the model of configs/multi30k_dense.txtpb, and of
a plain PyTorch loop that keeps keys and values: with one source at a time, and with a batch.

The sources are lines of random symbols, and the weights are random. The output layer has a table of
its own: with that of the inputs, the likeliest token would be the one before, an end mark. So
nearly all texts have --tokens tokens; of one that ends earlier, only its own count. Greedy texts of
both sides are compared first: they must agree but for ties that rounding decides. Ours is the whole
program: the time of many lines less the time of few, so without its start.
"""

import argparse
import json
import math
import random
import statistics
import time

import birkhoff_runs as runs

END, FIRST = 1, 2  # of the corpora of prepare --generate


class Model:
    """The peer: pre-norm, ReLU, sinusoids, one table for sources and targets."""

    def __init__(self, run, heads, layers):
        import torch

        self.heads, self.layers = heads, layers
        self.w = {}
        for file in runs.newest_checkpoint(run).glob("model*.safetensors"):
            for name, (_, shape, data) in runs.read_safetensors(file).items():
                self.w[name] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
        self.table = self.w["encoder.embedding.weight"]
        channels = self.table.shape[1]
        half = channels // 2
        step = math.log(1e4) / (half - 1)
        angles = torch.arange(256)[:, None] * torch.exp(-step * torch.arange(half))
        self.positions = torch.cat([angles.sin(), angles.cos()], 1)

    def linear(self, name, x):
        import torch.nn.functional as F

        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def norm(self, name, x):
        import torch.nn.functional as F

        return F.layer_norm(x, x.shape[-1:], self.w[name + ".weight"], self.w.get(name + ".bias"))

    def split(self, x, parts):
        return [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in x.chunk(parts, -1)]

    def embed(self, ids, position):
        table = self.table
        x = table[ids] * math.sqrt(table.shape[1])
        return x + self.positions[position : position + ids.shape[1]]

    def attend(self, name, x, q, k, v, mask=None):
        import torch.nn.functional as F

        y = F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.linear(name + ".output", y.transpose(1, 2).flatten(2))

    def feed_forward(self, name, x):
        hidden = self.linear(name + ".feed_forward.up", self.norm(name + ".feed_forward_norm", x))
        return x + self.linear(name + ".feed_forward.down", hidden.relu())

    def encode(self, ids, mask):
        x = self.embed(ids, 0)
        for i in range(self.layers):
            name = f"encoder.blocks.{i}"
            y = self.norm(name + ".attention_norm", x)
            q, k, v = self.split(self.linear(name + ".attention.query_key_value", y), 3)
            x = self.feed_forward(name, self.attend(name + ".attention", x, q, k, v, mask))
        return self.norm("encoder.final_norm", x)

    def seconds_of_products(self, rows):
        """Of a step's matrix products alone, in PyTorch."""
        import torch
        import torch.nn.functional as F

        weights = [w for name, w in self.w.items()
                   if name.startswith(("blocks.", "output.")) and w.dim() == 2
                   and "key_value" not in name.replace("query_key_value", "")]
        inputs = {columns: torch.randn(rows, columns) for columns in {w.shape[1] for w in weights}}
        times = []
        for _ in range(30):
            start = time.perf_counter()
            for w in weights:
                F.linear(inputs[w.shape[1]], w)
            times.append(time.perf_counter() - start)
        return statistics.median(times[5:])

    def generate(self, sources, tokens):
        import torch

        longest = max(map(len, sources))
        ids = torch.tensor([s + [0] * (longest - len(s)) for s in sources])
        mask = (torch.arange(longest) < torch.tensor([[len(s)] for s in sources]))[:, None, None]
        memory = self.encode(ids, mask)
        crossed = [
            self.split(self.linear(f"blocks.{i}.cross_attention.key_value", memory), 2)
            for i in range(self.layers)
        ]
        cache = [None] * self.layers
        last = torch.full((len(sources), 1), END)
        generated = []
        for t in range(tokens):
            x = self.embed(last, t)
            for i in range(self.layers):
                name = f"blocks.{i}"
                y = self.norm(name + ".attention_norm", x)
                q, k, v = self.split(self.linear(name + ".attention.query_key_value", y), 3)
                if cache[i]:
                    k, v = (torch.cat(pair, 2) for pair in zip(cache[i], (k, v)))
                cache[i] = (k, v)
                x = self.attend(name + ".attention", x, q, k, v)
                y = self.norm(name + ".cross_attention_norm", x)
                (q,) = self.split(self.linear(name + ".cross_attention.query", y), 1)
                x = self.attend(name + ".cross_attention", x, q, *crossed[i], mask)
                x = self.feed_forward(name, x)
            logits = self.norm("final_norm", x) @ self.w["output.weight"].T
            last = logits.argmax(-1)
            generated.append(last)
        return torch.cat(generated, 1).tolist()


def until_end(ids):
    return ids[: ids.index(END)] if END in ids else ids


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--symbols", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    a = parser.parse_args()
    import torch

    torch.set_num_threads(a.threads)
    folder = runs.WORK / "decoding_speed"
    folder.mkdir(parents=True, exist_ok=True)
    corpus, run = folder / "corpus", folder / "run"
    if not (corpus / "manifest.json").exists():
        runs.birkhoff("prepare", "--out", corpus, "--generate", "copy", "--symbols", a.symbols,
                      "--train-length", 24, "--length", 24, "--samples", 2000, "--test-samples", 64)
    runs.train(runs.ROOT / "configs/multi30k_dense.txtpb", run, threads=a.threads,
               settings=[f"data.corpus={corpus}", "train.steps=1", "evaluate.every=0",
                         "train.schedule.learning_rate=0", "model.tie_embeddings=false",
                         f"model.layers={a.layers}", f"model.heads={a.heads}"])
    rng = random.Random(1)
    sources = [[rng.randrange(a.symbols) for _ in range(rng.randint(6, 24))]
               for _ in range(a.lines)]

    def ours(count, beam):
        path = folder / f"sources-{count}.txt"
        path.write_text("".join(" ".join(map(str, s)) + "\n" for s in sources[:count]))
        start = time.perf_counter()
        lines = runs.birkhoff("generate", run, "--input", path, "--beam", beam, "--batch", a.batch,
                              "--max-tokens", a.tokens, "--json", threads=a.threads)
        seconds = time.perf_counter() - start
        return seconds, [json.loads(line) for line in lines.splitlines()]

    model = Model(run, a.heads, a.layers)

    def peer(count, batch):
        ids = [[s + FIRST for s in source] + [END] for source in sources[:count]]
        order = sorted(range(count), key=lambda i: -len(ids[i]))
        texts = [None] * count
        start = time.perf_counter()
        with torch.no_grad():
            for begin in range(0, count, batch):
                of_batch = order[begin : begin + batch]
                for i, text in zip(of_batch, model.generate([ids[i] for i in of_batch], a.tokens)):
                    texts[i] = text
        return time.perf_counter() - start, texts

    _, texts = ours(a.batch, 1)
    _, expected = peer(a.batch, a.batch)
    same = sum(text["text"].split() == [str(i - FIRST) for i in until_end(ids)]
               for text, ids in zip(texts, expected))
    whole = sum(text["tokens"] == a.tokens for text in texts)
    print(runs.title())
    print(f"\ngreedy texts that agree: {same}, that have all tokens: {whole}, of {a.batch}")
    if same < 0.9 * a.batch or whole < 0.9 * a.batch:
        raise SystemExit("the two sides do not compute the same model, or texts end early")
    few = a.batch
    # Of the program, with one batch.
    start = {beam: min(ours(few, beam)[0] for _ in range(3)) for beam in (1, 4)}
    speeds = {}

    def add(name, tokens, seconds):
        speeds.setdefault(name, []).append(tokens / seconds)

    for _ in range(a.rounds):
        add(f"floor: PyTorch's matrix products, batch {a.batch}", a.batch,
            model.seconds_of_products(a.batch))
        for beam in (1, 4):
            seconds, texts = ours(a.lines, beam)
            add(f"birkhoff generate, beam {beam}", sum(text["tokens"] for text in texts[few:]),
                seconds - start[beam])
        add(f"PyTorch loop, greedy, batch {a.batch}", a.lines * a.tokens,
            peer(a.lines, a.batch)[0])
        alone = min(a.lines, 32)
        add("PyTorch loop, greedy, one at a time", alone * a.tokens, peer(alone, 1)[0])
    base = statistics.median(speeds["birkhoff generate, beam 1"])
    print("\n| | tokens/s | of greedy generate |\n|---|---|---|")
    for name, values in speeds.items():
        median = statistics.median(values)
        print(f"| {name} | {median:,.0f} | {median / base:.2f} |")


main()
