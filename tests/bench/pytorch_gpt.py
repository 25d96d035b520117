"""The peer: the baby GPT in PyTorch eager, with scaled_dot_product_attention and fused AdamW.

Run as a program it trains on random windows of a text and prints one JSON object; step_speed.py and baby_gpt.py call it.
"""

import argparse
import json
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(channels, bias=False)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.output = nn.Linear(channels, channels, bias=False)
        self.norm2 = nn.LayerNorm(channels, bias=False)
        self.up = nn.Linear(channels, 4 * channels, bias=False)
        self.down = nn.Linear(4 * channels, channels, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, layers=4, channels=128, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, channels)
        self.positions = nn.Embedding(context, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(channels, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, x, y):
        h = self.embedding(x) + self.positions.weight[: x.size(1)]
        for block in self.blocks:
            h = block(h)
        logits = self.norm(h) @ self.embedding.weight.t()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


def optimizer(model, lr):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def rate(step, steps, warmup=100, peak=1e-3, final=1e-4):
    """The schedule of configs/baby_gpt_dense.txtpb: linear rise, then a cosine; step counts from 1."""
    if step <= warmup:
        return peak * step / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * share))


def batch(tokens, size, context, generator):
    starts = torch.randint(len(tokens) - context, (size,), generator=generator)
    x = torch.stack([tokens[s:s + context] for s in starts])
    y = torch.stack([tokens[s + 1:s + 1 + context] for s in starts])
    return x, y


def train_step(model, opt, x, y, lr):
    for group in opt.param_groups:
        group["lr"] = lr
    opt.zero_grad(set_to_none=True)
    loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return loss


@torch.no_grad()
def validation_loss(model, tokens, context):
    """Mean over the whole split, windows not overlapping, the last one shorter."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start:start + context + 1]
        x, y = window[:-1][None], window[1:][None]
        total += model(x, y).double().item() * y.numel()
        count += y.numel()
    return total / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--schedule-steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    text = open(arguments.text).read()
    characters = sorted(set(text))
    index = {c: i for i, c in enumerate(characters)}
    tokens = torch.tensor([index[c] for c in text])
    cut = int(len(tokens) * 0.9)
    model = GPT(len(characters), arguments.context)
    opt = optimizer(model, 1e-3)
    generator = torch.Generator().manual_seed(arguments.seed)
    times = []
    for step in range(1, arguments.steps + 1):
        start = time.perf_counter()
        x, y = batch(tokens[:cut], arguments.batch, arguments.context, generator)
        loss = train_step(model, opt, x, y, rate(step, arguments.schedule_steps))
        loss.item()
        times.append(time.perf_counter() - start)
    times = sorted(times[10:])
    result = {"loss": loss.item(), "tokens_per_second": arguments.batch * arguments.context / times[len(times) // 2]}
    if arguments.evaluate:
        result["validation_loss"] = validation_loss(model, tokens[cut:], arguments.context)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
