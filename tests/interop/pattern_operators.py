"""Tests sparse_transformer_attention and sortcut_attention: their definitions in eager PyTorch, and
what they must do apart from formulas. A part of pytorch_operators.py."""

import itertools
import math

import torch

from gathered_operators import documents, softmax_over, terms_of
from operator_definitions import BARRED, balance, check, dropout_factors, open_pairs, tokens


def sees(length, stride, summary, pattern, part, causal):
    """bool [L, L]: which keys each query sees (Child et al. 2019)."""
    key = torch.arange(length)
    query = key[:, None]
    if pattern == "strided":
        first, second = (query - key).abs() < stride, (query - key) % stride == 0
    else:
        first, second = query // stride == key // stride, key % stride >= stride - summary
    seen = (first if part == "merged" else torch.zeros_like(query, dtype=torch.bool)) | second
    return seen & (key <= query) if causal else seen.expand(length, length)


def sparse_transformer_attention(q,
                                 k,
                                 v,
                                 stride,
                                 summary=8,
                                 pattern="fixed",
                                 part="merged",
                                 causal=True,
                                 *,
                                 key_lengths=None,
                                 segments=None,
                                 **terms):
    L, document = q.shape[2], documents(k, key_lengths, segments)
    queries = documents(q, None, segments)
    together = queries[:, :, None] == document[:, None]
    count = sees(L, stride, min(summary, stride), pattern, part, causal).to(q.device) & together
    least = terms and (1 - terms["relative_keys"].shape[1]) // (1 if causal else 2)
    return softmax_over(q, k, v, count[:, None].expand(-1, k.shape[1], -1, -1), least, **terms)


def sortcut_attention(q,
                      k,
                      v,
                      scores,
                      block,
                      blocks,
                      iterations=5,
                      local=False,
                      *,
                      dropout=0.0,
                      seed=None,
                      key_lengths=None,
                      relative_keys=None,
                      relative_values=None,
                      sink=None):
    """One softmax over the first sorted blocks (Tay et al. 2020, section 3.3) and, with `local`,
    over the query's own block, of two different kinds of keys: each is `softmax_over` of its own
    keys, and both are merged by the sums of their weights."""
    B, H, L, D = q.shape
    S, group = k.shape[2], H // k.shape[1]
    block = min(block, S)
    exists, document = tokens(S, block, key_lengths, None)
    exists = exists.expand(B, -1).to(q.device)
    open = open_pairs(block, exists.cpu(), document.expand(B, -1)).to(q.device)[:, None]
    p = balance(scores.masked_fill(~open, BARRED), iterations, "full").masked_fill(~open, 0).to(q)
    p, exists = p[:, :, :blocks], exists.unflatten(1, (-1, block))
    n = p.shape[2]
    parts = [
        torch.nn.functional.pad(x, (0, 0, 0, -S % block)).unflatten(2, (-1, block)) *
        exists[:, None, :, :, None] for x in (k, v)
    ]
    total = p.sum(-1, keepdim=True)
    share = p @ exists[:, None].to(p) / total.masked_fill(total == 0, 1)
    there = (share > 0).flatten(2)
    share = share.masked_fill(share == 0, 1)
    sorted_k, sorted_v = ((torch.einsum("bhuv,bhvtd->bhutd", p, x) / share[..., None]).flatten(
        2, 3).repeat_interleave(group, 1) for x in parts)
    logits = [(q @ sorted_k.mT / math.sqrt(D) + share.log().flatten(2).repeat_interleave(
        group, 1)[:, :, None]).masked_fill(~there.repeat_interleave(group, 1)[:, :, None],
                                           -math.inf)]
    if local:
        key = torch.arange(S, device=q.device)
        own = q @ k.repeat_interleave(group, 1).mT
        if relative_keys is not None:
            row = (key - key[:, None] + (relative_keys.shape[1] - 1) // 2).clamp(
                0, relative_keys.shape[1] - 1)
            own = own + torch.einsum("bhid,hijd->bhij", q, relative_keys[:, row].expand(
                H, -1, -1, -1))
        seen = (key[:, None] // block == key // block) & exists.flatten(1)[:, :S][:, None]
        logits.append((own / math.sqrt(D)).masked_fill(~seen[:, None], -math.inf))
    logits = torch.cat(logits, -1)
    alone = (logits == -math.inf).all(-1, keepdim=True)
    if sink is not None:
        logits = torch.cat([logits, sink[:, None, None].to(q).expand(B, H, L, 1)], -1)
    p = logits.masked_fill(alone, 0).softmax(-1).masked_fill(alone, 0)
    if dropout:  # drawn for blocks of queries, n b shared columns and those of the own block
        together = 1 if local or L < n * block else n
        length = together * block
        factors = dropout_factors(seed.item(), dropout, (B, H, -(-L // length), length,
                                                         (n + local) * block)).flatten(2, 3)
        factors = factors[:, :, :L].to(p)
        columns = [factors[..., :n * block]]
        if local:
            column = n * block + torch.arange(S) % block
            columns.append(factors[..., column])
        p = p[..., :n * block + (S if local else 0)] * torch.cat(columns, -1)
    out = p[..., :n * block] @ sorted_v
    if local:
        own = p[..., n * block:n * block + S]
        out = out + own @ v.repeat_interleave(group, 1)
        if relative_values is not None:
            out = out + torch.einsum("bhij,hijd->bhid", own, relative_values[:, row].expand(
                H, -1, -1, -1))
    return out


def pattern_definitions(same, heads, device):
    ops, count = torch.ops.birkhoff, 0

    def compare(name, arguments, inputs, tolerance, **options):
        """Ours against the definition, which is computed in fp32 for narrower dtypes."""
        nonlocal count
        dtype, definition = inputs[0].dtype, globals()[name]
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        widened = {
            key: x.to(wide) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for key, x in options.items()
        }
        same(f"{name}{arguments} with {list(options)}, {[tuple(x.shape) for x in inputs]}, {dtype}",
             lambda *x: getattr(ops, name)(*x, *arguments, **options),
             lambda *x: definition(*(y.to(wide) for y in x), *arguments, **widened).to(dtype),
             inputs, tolerance)
        count += 1

    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        for length, key_heads in ((33, 4), (19, 2), (5, 1)):
            make = lambda heads_, tokens_: heads((2, heads_, tokens_, 6), dtype, device)
            q, k, v = make(4, length), make(key_heads, length), make(key_heads, length)
            lengths = torch.tensor([length, length // 2 + 1], device=device)
            segments = (torch.arange(length, device=device) // 7).expand(2, -1).contiguous()
            terms = terms_of(4, 6, 9, dtype, device)
            for pattern, part, causal in itertools.product(
                ("fixed", "strided"), ("merged", "second"), (True, False)):
                for summary, options in ((1, {}), (3, {"key_lengths": lengths, **terms}),
                                         (8, {"segments": segments, "key_lengths": lengths})):
                    compare("sparse_transformer_attention", (4, summary, pattern, part, causal),
                            [q, k, v], tolerance, **options)
            noise = {"dropout": 0.25, "seed": torch.tensor([length * 2**40 + 7], device=device)}
            of_scores = torch.float64 if dtype == torch.float64 else torch.float32
            for tokens_, local in ((length, True), (length, False), (11, False)):
                others = [q, *(make(key_heads, tokens_) for _ in range(2))]
                N = -(-tokens_ // 4)
                scores = torch.randn(2, key_heads, N, N, dtype=torch.float64).to(device, of_scores)
                padded = {"key_lengths": torch.tensor([tokens_, tokens_ // 2 + 1], device=device)}
                more = terms if local else {"sink": terms["sink"]}
                for blocks, options in ((1, {}), (2, {**padded, **more}), (100, {**noise, **more}),
                                        (2, {**padded, **noise})):
                    # The gradient of scores is a small difference of sums, which bf16 rounds.
                    given = (4, blocks, 3, local)
                    if dtype == torch.bfloat16:
                        compare("sortcut_attention", (scores, *given), others, tolerance, **options)
                    else:
                        compare("sortcut_attention", given, [*others, scores], tolerance, **options)
    print(f"{count} results of sparse patterns and SortCut agree with their definitions")


def pattern_meaning(heads, device):
    ops = torch.ops.birkhoff
    near = lambda a, b, bound=1e-12: bool((a - b).abs().max() <= bound)
    q, k, v = (heads((2, 4, 24, 8), torch.float64, device) for _ in range(3))
    for causal in (True, False):
        dense = ops.dense_attention(q, k, v, causal)
        for stride, pattern in ((100, "fixed"), (100, "strided"), (1, "fixed"), (1, "strided")):
            made = ops.sparse_transformer_attention(q, k, v, stride, 1, pattern, "merged", causal)
            check(near(made, dense), f"{pattern}, stride {stride}: not dense")
    # With one block, nothing is sorted; all sorted blocks of even weights are one mean block.
    scores = torch.randn(2, 4, 1, 1, dtype=torch.float64, device=device)
    check(near(ops.sortcut_attention(q, k, v, scores, 24, 1), ops.dense_attention(q, k, v, False)),
          "SortCut of one block is not dense attention")
    even = torch.zeros(2, 4, 6, 6, dtype=torch.float64, device=device)
    mean = lambda x: x.unflatten(2, (6, 4)).mean(2)
    check(near(ops.sortcut_attention(q, k, v, even, 4, 3),
               ops.dense_attention(q, mean(k), mean(v), False)),
          "SortCut of even scores is not attention to the mean block")
    # Permuted queries give permuted outputs.
    order = torch.randperm(24, device=device)
    scores = torch.randn(2, 4, 6, 6, dtype=torch.float64, device=device)
    check(near(ops.sortcut_attention(q[:, :, order], k, v, scores, 4, 2),
               ops.sortcut_attention(q, k, v, scores, 4, 2)[:, :, order]),
          "SortCut depends on the order of queries")
    print("sparse patterns and SortCut have the limits of their definitions")


def pattern_cases(heads, device):
    """As cases() of pytorch_operators.py."""
    leaf = lambda x: x.detach().requires_grad_()
    for length in (8, 7):
        make = lambda count, tokens_=length: leaf(
            heads((1, count, tokens_, 3), torch.float64, device))
        square = lambda count, N: leaf(
            torch.randn(1, count, N, N, dtype=torch.float64, device=device))
        lengths, N = torch.tensor([6], device=device), -(-length // 3)
        segments = (torch.arange(length, device=device) >= 3).long()[None]
        terms = {key: leaf(x) for key, x in terms_of(2, 3, 5, torch.float64, device).items()}
        noise = {"dropout": 0.5, "seed": torch.tensor([11], device=device)}
        for pattern in ("fixed", "strided"):
            yield "sparse_transformer_attention", (make(2), make(2), make(2), 3, 1, pattern), {}
            yield "sparse_transformer_attention", (make(2), make(1), make(1), 3, 1, pattern,
                                                   "second", False), {}
        yield "sparse_transformer_attention", (make(2), make(1), make(1), 3, 2), {
            "key_lengths": lengths,
            "segments": segments,
            **terms
        }
        yield "sortcut_attention", (make(2), make(2), make(2), square(2, N), 3, 2), {}
        yield "sortcut_attention", (make(2), make(1, 5), make(1, 5), square(1, 2), 3, 1), {
            "sink": terms["sink"]
        }
        yield "sortcut_attention", (make(2), make(1), make(1), square(1, N), 3, 2, 2, True), {
            "key_lengths": lengths,
            **noise,
            **terms
        }


def pattern_calls(heads, device):
    """(operator, inputs, options) of the private operators."""
    ops = torch.ops.birkhoff
    none = torch.zeros(0, dtype=torch.float64, device=device)
    for name, arguments, keywords in pattern_cases(heads, device):
        inputs = [
            *arguments[:3],
            *(keywords.get(key, none) for key in ("relative_keys", "relative_values", "sink"))
        ]
        if name == "sparse_transformer_attention":
            defaults = ("fixed", "merged", True)
            given = arguments[5:]
            yield ops._attention_in_pattern, inputs, (*arguments[3:5], *given,
                                                      *defaults[len(given):],
                                                      keywords.get("key_lengths"),
                                                      keywords.get("segments"))
        else:
            weights = arguments[3].softmax(-1)[:, :, :arguments[5]].detach().requires_grad_()
            yield ops._attention_to_shared_blocks, [*inputs, weights], (
                3, len(arguments) > 7, keywords.get("dropout", 0.0), keywords.get("seed"),
                keywords.get("key_lengths"))


def pattern_refusals():
    """(message, call) of wrong arguments."""
    ops = torch.ops.birkhoff
    q, meta = torch.randn(1, 2, 10, 4), lambda x: x.to("meta")
    some, scores, table = q[:, :, :6], torch.randn(1, 2, 3, 3), torch.randn(2, 3, 4)
    pattern = lambda *arguments, q=q, k=q, v=q, **options: ops.sparse_transformer_attention(
        q, k, v, *arguments, **options)
    cut = lambda block=4, blocks=1, *arguments, k=q, v=q, scores=scores, **options: (
        ops.sortcut_attention(q, k, v, scores, block, blocks, *arguments, **options))
    shared = lambda *inputs, block=4: ops._attention_to_shared_blocks(
        list(inputs), block, False, 0.0, None, None)
    none = torch.zeros(0)
    return [
        ("stride must be at least 1 and at most 1048576, not 0", lambda: pattern(0)),
        ("stride .* not 4611686018427387904", lambda: pattern(1 << 62)),
        ("summary must be at least 1 and at most 1048576, not 0", lambda: pattern(4, 0)),
        ("pattern is 'diagonal'; it must be fixed or strided", lambda: pattern(4, 1, "diagonal")),
        ("pattern is 'diagonal'", lambda: pattern(4, 1, "diagonal", q=meta(q), k=meta(q),
                                                  v=meta(q))),
        ("part is 'first'; it must be merged or second", lambda: pattern(4, 1, "fixed", "first")),
        ("k and v must be like q", lambda: pattern(4, k=some, v=some)),
        ("k must be", lambda: pattern(4, k=none)),
        ("key_lengths .* not 11", lambda: pattern(4, key_lengths=torch.tensor([11]))),
        ("segments must never decrease",
         lambda: pattern(4, segments=torch.tensor([[1] * 5 + [0] * 5]))),
        ("block must be at least 1 and at most 1048576, not 0", lambda: cut(0)),
        ("blocks must be at least 1 and at most 1048576, not 0", lambda: cut(4, 0)),
        ("iterations .* not 0", lambda: cut(4, 1, 0)),
        (r"block weights must be \[1, 2, 1 to 5, 5\], not", lambda: cut(2)),
        ("k and v must be like q", lambda: cut(4, 1, 5, True, k=some, v=some)),
        ("k and v must be like q", lambda: cut(k=some)),
        ("key_lengths .* at most 6, not 7",
         lambda: cut(k=some, v=some, scores=scores[..., :2, :2], key_lengths=torch.tensor([7]))),
        ("sorted blocks have no relative positions", lambda: cut(relative_keys=table)),
        ("needs a seed", lambda: cut(dropout=0.5)),
        ("dropout must be in", lambda: cut(dropout=1.0, seed=torch.tensor(1))),
        ("block weights are missing", lambda: shared(q, q, q, none, none, none)),
        ("block weights are missing", lambda: shared(q, q, q, none, none, none, none)),
        ("k must be", lambda: cut(k=q[0], key_lengths=torch.tensor([4]))),
        ("k must be", lambda: shared(q, none, q, none, none, none, scores)),
    ]
