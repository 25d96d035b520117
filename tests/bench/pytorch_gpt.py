"""The peer: this project's language models in PyTorch, eager or compiled, with
scaled_dot_product_attention and fused AdamW. Sinkhorn attention is composed of PyTorch operations:
block weights, one product that mixes blocks, and scaled_dot_product_attention with blocks as heads.

As a program, it trains on random windows of a text or of random tokens, and prints one JSON object.
step_speed.py and baby_gpt.py call it.
"""

import argparse
import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

# The models of configs/*.txtpb with these names, as far as the peer needs them. `words`: the
# vocabulary for speed measurements; without it, characters.
MODELS = {
    "baby_gpt_dense": dict(layers=4, channels=128, heads=4),
    "baby_gpt_sinkhorn": dict(layers=4, channels=128, heads=4, block=16),
    "lmx_base_dense": dict(layers=6, channels=512, heads=8, tie=False, words=32000),
    "lmx_base_sinkhorn": dict(layers=6, channels=512, heads=8, tie=False, words=32000, block=64),
}
ITERATIONS, TEMPERATURE = 5, 0.75
BARRED = -1e30


class SinkhornAttention(nn.Module):
    """Causal, `prefix` normalization, pooling by the block's first token, one linear layer as
    SortNet (configs/schema/attention.proto)."""
    def __init__(self, context, channels, heads, block):
        super().__init__()
        self.block, blocks = block, context // block
        self.sort = nn.Parameter(0.02 * torch.randn(heads, channels, blocks))
        self.bias = nn.Parameter(torch.zeros(heads, blocks))
        u = torch.arange(blocks)
        # The matrix for row u: destinations 1 to u, because destination 0 has no source, and
        # sources 0 to u - 1.
        taking_part = (u[None, :, None] <= u[:, None, None]) & (u[None, :, None] > 0) & (
            u[None, None, :] < u[:, None, None])
        self.register_buffer("taking_part", taking_part, persistent=False)
        own = torch.ones(block, block, dtype=torch.bool).tril().expand(blocks, -1, -1)
        self.register_buffer("seen",
                             torch.cat([(u > 0)[:, None, None].expand(-1, block, block), own], 2),
                             persistent=False)

    def weights(self, x):
        """[B, H, N, N]: row u is the last row of the Sinkhorn normalization over the blocks before
        u."""
        with torch.autocast(x.device.type, enabled=False):
            pooled = x.unflatten(1, (-1, self.block))[:, :, 0].float()
            scores = (torch.einsum("bnc,hcm->bhnm", pooled, self.sort) +
                      self.bias[:, None]) / TEMPERATURE
            s = torch.where(self.taking_part, scores[:, :, None],
                            BARRED)  # [B, H, u, destination, source]
            for _ in range(ITERATIONS):
                s = torch.where(self.taking_part, s - s.logsumexp(3, keepdim=True), BARRED)
                s = torch.where(self.taking_part, s - s.logsumexp(4, keepdim=True), BARRED)
            return torch.diagonal(s, dim1=2, dim2=3).movedim(-1, 2).exp()

    def forward(self, x, q, k, v):
        weights = self.weights(x).to(k.dtype)
        q, k, v = (z.unflatten(2, (-1, self.block)) for z in (q, k, v))  # [B, H, N, b, D]
        k, v = (torch.cat([(weights @ z.flatten(3)).view_as(z), z], 3) for z in (k, v))
        y = F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
                                           self.seen)
        return y.unflatten(0, q.shape[:2]).flatten(2, 3)


class Block(nn.Module):
    def __init__(self, context, channels, heads, block):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(channels, bias=False)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.sinkhorn = SinkhornAttention(context, channels, heads, block) if block else None
        self.output = nn.Linear(channels, channels, bias=False)
        self.norm2 = nn.LayerNorm(channels, bias=False)
        self.up = nn.Linear(channels, 4 * channels, bias=False)
        self.down = nn.Linear(4 * channels, channels, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        h = self.norm1(x)
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2)
                   for z in self.qkv(h).split(c, dim=2))
        y = self.sinkhorn(h, q, k, v) if self.sinkhorn else F.scaled_dot_product_attention(
            q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """`block`: tokens per block of Sinkhorn attention; None: dense. `words` is not used by the
    network."""
    def __init__(self,
                 vocabulary,
                 context,
                 layers=4,
                 channels=128,
                 heads=4,
                 tie=True,
                 block=None,
                 words=None):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, channels)
        self.positions = nn.Embedding(context, channels)
        self.blocks = nn.ModuleList(Block(context, channels, heads, block) for _ in range(layers))
        self.norm = nn.LayerNorm(channels, bias=False)
        self.own_output = None if tie else nn.Parameter(torch.empty(vocabulary, channels))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and "sinkhorn" not in name:
                residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, x, y):
        h = self.embedding(x) + self.positions.weight[:x.size(1)]
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h),
                          self.embedding.weight if self.own_output is None else self.own_output)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))

    def load(self, weights):
        """Loads one of our checkpoints. weights: a function from its names to tensors."""
        to = {
            "embedding.weight": self.embedding.weight,
            "positions.weight": self.positions.weight,
            "final_norm.weight": self.norm.weight
        }
        if self.own_output is not None:
            to["output.weight"] = self.own_output
        for i, block in enumerate(self.blocks):
            to |= {
                f"blocks.{i}.{name}": parameter for name, parameter in {
                    "attention_norm.weight": block.norm1.weight,
                    "attention.query_key_value.weight": block.qkv.weight,
                    "attention.output.weight": block.output.weight,
                    "feed_forward_norm.weight": block.norm2.weight,
                    "feed_forward.up.weight": block.up.weight,
                    "feed_forward.down.weight": block.down.weight
                }.items()
            }
            if block.sinkhorn:
                to |= {
                    f"blocks.{i}.attention.groups.0.sort_net.output.weight": block.sinkhorn.sort,
                    f"blocks.{i}.attention.groups.0.sort_net.output.bias": block.sinkhorn.bias
                }
        with torch.no_grad():
            for name, parameter in to.items():
                parameter.copy_(weights(name))


def optimizer(model, lr):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def rate(step, steps, warmup=100, peak=1e-3, final=1e-4):
    """The schedule of configs/baby_gpt_dense.txtpb: linear warm-up, then a cosine; step counts from
    1."""
    if step <= warmup:
        return peak * step / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * share))


def batch(tokens, size, context, generator):
    starts = torch.randint(len(tokens) - context, (size,), generator=generator)
    x = torch.stack([tokens[s:s + context] for s in starts])
    y = torch.stack([tokens[s + 1:s + 1 + context] for s in starts])
    return x, y


def train_step(model, opt, x, y, lr, precision="fp32"):
    """(loss, gradient norm before clipping)"""
    for group in opt.param_groups:
        group["lr"] = lr
    opt.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = model(x, y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return loss, norm


@torch.no_grad()
def validation_loss(model, tokens, context):
    """Mean over the whole split, in windows that do not overlap; the last one is shorter."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start:start + context + 1]
        x, y = window[:-1][None], window[1:][None]
        total += model(x, y).double().item() * y.numel()
        count += y.numel()
    return total / count


def matrix_speed(device, precision):
    """FLOP/s of large matrix products: the most that a model can reach on this machine."""
    size = 8192 if device == "cuda" else 1024
    a = torch.randn(size,
                    size,
                    device=device,
                    dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    b = a.t().contiguous()
    times = []
    for _ in range(23):
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times[3:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="baby_gpt_dense")
    parser.add_argument(
        "--text", help="characters to train on; without it, random tokens of the model's words")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--schedule-steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    if arguments.text:
        text = open(arguments.text).read()
        characters = sorted(set(text))
        index = {c: i for i, c in enumerate(characters)}
        tokens, vocabulary = torch.tensor([index[c] for c in text]), len(characters)
    else:
        vocabulary = MODELS[arguments.model]["words"]
        tokens = torch.randint(vocabulary, (1 << 22,))
    cut = int(len(tokens) * 0.9)
    model = GPT(vocabulary, arguments.context, **MODELS[arguments.model]).to(arguments.device)
    opt = optimizer(model, 1e-3)
    trained = torch.compile(model) if arguments.compile else model
    generator = torch.Generator().manual_seed(arguments.seed)
    times = []
    for step in range(1, arguments.steps + 1):
        start = time.perf_counter()
        x, y = (z.to(arguments.device)
                for z in batch(tokens[:cut], arguments.batch, arguments.context, generator))
        loss, _ = train_step(trained, opt, x, y, rate(step, arguments.schedule_steps),
                             arguments.precision)
        loss.item()
        times.append(time.perf_counter() - start)
    result = {
        "loss": loss.item(),
        "tokens_per_second": arguments.batch * arguments.context / statistics.median(times[10:]),
        "matrix_speed": matrix_speed(arguments.device, arguments.precision)
    }
    if arguments.evaluate:
        result["validation_loss"] = validation_loss(model, tokens[cut:], arguments.context)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
