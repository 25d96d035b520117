"""Tests top_k_attention, entmax_attention and sinkformer_attention: their definitions in eager
PyTorch, and what they must do apart from formulas. A part of pytorch_operators.py."""

import itertools
import math

import torch

from operator_definitions import check, dropout_factors


def sees(q, k, causal, key_lengths=None, segments=None):
    """bool [B, 1, L, S]: which keys each query sees."""
    query, key = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    seen = (key <= query[:, None] if causal else key >= 0).expand(q.shape[0], len(query), len(key))
    if key_lengths is not None:
        seen = seen & (key < key_lengths[:, None, None])
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])
    return seen[:, None]


def scores_of(q, k):
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])


def output(p, v, dropout, seed):
    if dropout:
        p = p * dropout_factors(seed.item(), dropout, tuple(p.shape)).to(p)
    return p @ v.repeat_interleave(p.shape[1] // v.shape[1], 1)


def top_k_attention(q, k, v, count, causal=True, *, dropout=0.0, seed=None, **masks):
    scores, seen = scores_of(q, k), sees(q, k, causal, **masks)
    order = scores.masked_fill(~seen, -math.inf).argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True) & seen
    return output(scores.masked_fill(~kept, -1e30).softmax(-1) * kept, v, dropout, seed)


def entmax(scores, seen, alpha):
    """Weights max((a - 1) z - t, 0)^(1 / (a - 1)) that sum to 1; 0 where nothing is seen."""
    z = (alpha - 1) * scores.masked_fill(~seen & seen.any(-1, keepdim=True), -1e30)

    def powers(t, e):
        base = z - t
        return (base.clamp_min(1e-300) if z.dtype == torch.float64 else base.clamp_min(1e-35)
               )**e * (base > 0)

    with torch.no_grad():
        high = z.amax(-1, keepdim=True)
        low = high - 1
        for _ in range(100):
            middle = (low + high) / 2
            enough = powers(middle, 1 / (alpha - 1)).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        slope = powers(low, 1 / (alpha - 1) - 1).sum(-1, keepdim=True) / (alpha - 1)
    # Newton's last step, which has the gradient of the threshold.
    t = low + (powers(low, 1 / (alpha - 1)).sum(-1, keepdim=True) - 1) / slope
    return powers(t, 1 / (alpha - 1)) * seen


def entmax_attention(q, k, v, alpha=None, causal=True, *, dropout=0.0, seed=None, **masks):
    alpha = torch.tensor(1.5).to(q) if alpha is None else alpha
    p = entmax(scores_of(q, k), sees(q, k, causal, **masks), alpha.reshape(-1, 1, 1).to(q))
    return output(p, v, dropout, seed)


def sinkformer_attention(q,
                         k,
                         v,
                         half_steps=3,
                         gradient="unrolled",
                         *,
                         dropout=0.0,
                         seed=None,
                         query_lengths=None,
                         key_lengths=None):
    scores = scores_of(q, k)
    p = []
    for b in range(len(q)):
        n = q.shape[2] if query_lengths is None else query_lengths[b].item()
        m = k.shape[2] if key_lengths is None else key_lengths[b].item()
        s, g = scores[b, :, :n, :m], 0.0
        for _ in range(half_steps // 2):
            f = -(s + g).logsumexp(-1, keepdim=True)
            g = math.log(n / m) - (s + f).logsumexp(-2, keepdim=True)
            g = g.detach() if gradient == "truncated" else g
        p.append(
            torch.nn.functional.pad((s + g).softmax(-1), (0, k.shape[2] - m, 0, q.shape[2] - n)))
    return output(torch.stack(p), v, dropout, seed)


def all_pairs_definitions(same, heads, device):
    ops, count = torch.ops.birkhoff, 0

    def compare(name, arguments, inputs, tolerance, **options):
        """Ours against the definition, which is computed in fp32 for narrower dtypes."""
        nonlocal count
        dtype, definition = inputs[0].dtype, globals()[name]
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        more = arguments if len(inputs) == 3 else arguments[1:]
        same(f"{name}{arguments} with {list(options)}, {[tuple(x.shape) for x in inputs]}, {dtype}",
             lambda *x: getattr(ops, name)(*x, *more, **options),
             lambda *x: definition(*(y.to(wide) for y in x), *more, **options).to(dtype), inputs,
             tolerance)
        count += 1

    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.03)):
        for length, key_heads in ((33, 4), (19, 2), (5, 1)):
            make = lambda heads_, tokens: heads((2, heads_, tokens, 6), dtype, device)
            q, k, v = make(4, length), make(key_heads, length), make(key_heads, length)
            others = [q, make(key_heads, 11), make(key_heads, 11)]
            alpha = torch.tensor([1.2, 1.5, 1.8, 2.0], dtype=dtype, device=device)
            noise = {"dropout": 0.25, "seed": torch.tensor([length * 2**40 + 7], device=device)}
            lengths = torch.tensor([length, length // 2 + 1], device=device)
            masks = {
                "key_lengths": lengths,
                "segments": (torch.arange(length, device=device) // 7).expand(2, -1).contiguous()
            }
            some = {"key_lengths": torch.tensor([11, 4], device=device)}
            for causal, options in itertools.product((True, False), ({}, {**masks, **noise})):
                for kept in (1, 3, 100):
                    compare("top_k_attention", (kept, causal), [q, k, v], tolerance, **options)
                compare("entmax_attention", (None, causal), [q, k, v], tolerance, **options)
                compare("entmax_attention", ("learned", causal), [q, k, v, alpha[:4]], tolerance,
                        **options)
            compare("top_k_attention", (3, False), others, tolerance, **some)
            compare("entmax_attention", ("learned", False), [*others, alpha[2:3]], tolerance,
                    **some)
            for steps, gradient in ((1, "unrolled"), (3, "unrolled"), (3, "truncated"),
                                    (6 + 1, "unrolled")):
                compare("sinkformer_attention", (steps, gradient), [q, k, v], tolerance)
                compare("sinkformer_attention", (steps, gradient), [q, k, v],
                        tolerance,
                        query_lengths=lengths,
                        key_lengths=lengths,
                        **noise)
                compare("sinkformer_attention", (steps, gradient), others,
                        tolerance,
                        query_lengths=lengths,
                        **some)
    print(f"{count} results of top-k, entmax and Sinkformer agree with their definitions")


def all_pairs_meaning(heads, device):
    ops = torch.ops.birkhoff
    q, k, v = (heads((2, 4, 30, 8), torch.float64, device) for _ in range(3))
    near = lambda a, b, bound=1e-12: bool((a - b).abs().max() <= bound)
    for causal in (True, False):
        dense = ops.dense_attention(q, k, v, causal)
        check(near(ops.top_k_attention(q, k, v, 30, causal), dense), "top-k of all keys: not dense")
        of = torch.tensor(1 + 1e-4, dtype=torch.float64, device=device)
        check(near(ops.entmax_attention(q, k, v, of, causal), dense, 1e-3),
              "entmax does not tend to softmax")
    check(near(ops.sinkformer_attention(q, k, v, 1), dense), "one half-step is not softmax")
    # An indicator of each key as its value: outputs are weights.
    unit = torch.eye(30, dtype=torch.float64, device=device).expand(2, 4, -1, -1)
    key = heads((2, 4, 30, 30), torch.float64, device)
    weights = ops.top_k_attention(key, key, unit, 3, False)
    check(bool(((weights > 0).sum(-1) == 3).all()), "top-k keeps another number of keys")
    weights = ops.entmax_attention(key, key, unit, torch.tensor(2.0, device=device), False)
    check(near(weights.sum(-1), torch.ones(30).to(q)), "sparsemax: rows do not sum to 1")
    check(bool((weights == 0).any()), "sparsemax: no weight is 0")
    query = heads((2, 4, 30, 30), torch.float64, device)
    weights = ops.sinkformer_attention(query, key, unit, 999)
    for dim in (-1, -2):
        check(near(weights.sum(dim), torch.ones(30).to(q), 1e-6),
              f"the limit of half-steps is not doubly stochastic: sums over dim {dim}")
    gradients = []
    for gradient in ("unrolled", "implicit"):
        leaves = [(x / 2).requires_grad_() for x in (q, k, v)]
        ops.sinkformer_attention(*leaves, 399, gradient).square().sum().backward()
        gradients.append(torch.stack([x.grad for x in leaves]))
    check(near(*gradients, 1e-7), "the implicit gradient is not that of many half-steps")
    zeros = torch.zeros_like(key)
    check(near(ops.top_k_attention(zeros, zeros, unit, 2, False), unit[..., :2, :].mean(2, True)),
          "of equal scores, those of the first keys are not kept")
    print("top-k, entmax and Sinkformer have the limits, sums and zeros of their definitions")


def all_pairs_cases(heads, device):
    """As cases() of pytorch_operators.py."""
    leaf = lambda x: x.detach().requires_grad_()
    for length in (8, 7):
        make = lambda count, tokens=length: leaf(
            heads((1, count, tokens, 3), torch.float64, device))
        exponents = lambda *x: leaf(torch.tensor(x, dtype=torch.float64, device=device))
        noise = {"dropout": 0.5, "seed": torch.tensor([11], device=device)}
        lengths = torch.tensor([6], device=device)
        options = {
            "key_lengths": lengths,
            "segments": (torch.arange(length, device=device) >= 3).long()[None],
            **noise
        }
        yield "top_k_attention", (make(2), make(2), make(2), 2), {}
        yield "top_k_attention", (make(2), make(1, 6), make(1, 6), 3, False), {}
        yield "top_k_attention", (make(2), make(1), make(1), 2), options
        yield "entmax_attention", (make(2), make(2), make(2)), {}
        yield "entmax_attention", (make(2), make(1, 6), make(1, 6), exponents(1.6), False), {}
        yield "entmax_attention", (make(2), make(1), make(1), exponents(1.4, 1.7)), options
        yield "sinkformer_attention", (make(2), make(2), make(2)), {}
        yield "sinkformer_attention", (make(2), make(1, 6), make(1, 6), 5, "unrolled"), {
            "query_lengths": lengths - 1,
            "key_lengths": lengths - 2,
            **noise
        }


def private_calls(heads, device):
    """(operator, inputs, options) of the private operators."""
    ops = torch.ops.birkhoff
    for name, arguments, keywords in all_pairs_cases(heads, device):
        inputs = list(arguments[:3])
        noise = (keywords.get("dropout", 0.0), keywords.get("seed"))
        if name == "sinkformer_attention":
            lengths = map(keywords.get, ("query_lengths", "key_lengths"))
            for gradient in ("unrolled", "implicit", "truncated"):
                yield ops._doubly_stochastic_attention, inputs, (3, gradient, *noise, *lengths)
                lengths = (None, None)
            continue
        masks = map(keywords.get, ("key_lengths", "segments"))
        learned = name == "entmax_attention" and len(arguments) > 3
        alpha = arguments[3].expand(2) if learned else torch.full(
            (2 if name == "entmax_attention" else 0,), 1.5, dtype=torch.float64, device=device)
        causal = arguments[4] if len(arguments) > 4 else True
        yield ops._attention_by_rows, [*inputs, alpha], (0 if alpha.numel() else arguments[3],
                                                         learned, causal, *noise, *masks)


def all_pairs_compiled(same, heads, device):
    """One compiled graph serves all lengths, seeds and masks."""
    ops = torch.ops.birkhoff
    for name, call in (
        ("top_k_attention", lambda q, k, v, alpha, n, **options: ops.top_k_attention(
            q, k, v, 3, key_lengths=n, **options) + 0 * alpha.sum()),
        ("entmax_attention", lambda q, k, v, alpha, n, **options: ops.entmax_attention(
            q, k, v, alpha, key_lengths=n, **options)),
        ("sinkformer_attention", lambda q, k, v, alpha, n, **options: ops.sinkformer_attention(
            q, k, v, 5, query_lengths=n, key_lengths=n, **options) + 0 * alpha.sum())):
        compiled = torch.compile(call, fullgraph=True)
        for length, step in itertools.product((32, 40, 48), range(2)):
            inputs = [heads((2, 2, length, 8), torch.float32, device) for _ in range(3)]
            inputs.append(torch.tensor([1.3, 1.7], device=device))
            options = {
                "n": torch.tensor([length, 9 + step], device=device),
                "dropout": 0.25,
                "seed": torch.tensor([step], device=device)
            }
            # The second length makes PyTorch compile one graph for any length.
            with torch.compiler.set_stance(
                    "fail_on_recompile" if length == 48 or step > 0 else "default"):
                same(f"compiled {name} of {length} tokens", lambda *x: compiled(*x, **options),
                     lambda *x: call(*x, **options), inputs, 1e-6)
    print("compiled graphs of top-k, entmax and Sinkformer serve all lengths, seeds and masks")


def all_pairs_refusals():
    """(message, call) of wrong arguments."""
    ops = torch.ops.birkhoff
    q, meta = torch.randn(1, 2, 10, 4), lambda x: x.to("meta")
    some, lengths = q[:, :, :6], lambda *x: torch.tensor(x)
    top_k = lambda q=q, k=q, v=q, count=3, *arguments, **options: ops.top_k_attention(
        q, k, v, count, *arguments, **options)
    entmax_by = lambda *alpha, **options: ops.entmax_attention(q, q, q, *alpha, **options)
    sinkformer = lambda k=q, v=q, steps=3, *arguments, **options: ops.sinkformer_attention(
        q, k, v, steps, *arguments, **options)
    rows = lambda *inputs, count=3, learns=False: ops._attention_by_rows(
        list(inputs), count, learns, True, 0.0, None, None, None)
    none = torch.zeros(0)
    backward = (lambda gradients, saved: ops._attention_by_rows_backward(
        gradients, [q, q, q, none], saved, 3, False, True, 0.0, None, None, None))
    state = [torch.zeros(1, 2, 10, 3, dtype=torch.int32), torch.zeros(1, 2, 10, 3)]
    return [
        ("count must be at least 1 and at most 1048576, not 0", lambda: top_k(count=0)),
        ("count .* not 4611686018427387904", lambda: top_k(count=1 << 62)),
        ("count .* not 0", lambda: top_k(*[meta(q)] * 3, 0)),
        ("q must be", lambda: top_k(q=q[0])),
        ("none of them 0", lambda: top_k(*[q[:, :, :0]] * 3)),
        ("k must have tokens", lambda: top_k(q, q[:, :, :0], q[:, :, :0], 3, False)),
        ("k must be", lambda: top_k(k=none)),
        ("k and v must be like q", lambda: top_k(k=some, v=some)),
        ("k and v must be like q", lambda: top_k(q, some, q, 3, False)),
        ("k and v must be like q",
         lambda: top_k(q, some, some, 3, False, segments=torch.zeros(1, 6, dtype=torch.int64))),
        ("k and v must be like q", lambda: top_k(k=q.repeat(1, 2, 1, 1), v=q.repeat(1, 2, 1, 1))),
        ("one dtype", lambda: top_k(k=q.double())),
        ("key_lengths .* at most 6, not 7",
         lambda: top_k(q, some, some, 3, False, key_lengths=lengths(7))),
        ("segments must never decrease",
         lambda: entmax_by(segments=torch.tensor([[1] * 5 + [0] * 5]))),
        ("needs a seed", lambda: entmax_by(dropout=0.5)),
        ("dropout must be in", lambda: sinkformer(dropout=1.0, seed=lengths(1))),
        (r"alpha must be \[2\] or of one element, not \[3\]", lambda: entmax_by(torch.ones(3))),
        ("alpha must be float32, .* not Long", lambda: entmax_by(torch.tensor(2))),
        ("alpha must be on q's device", lambda: entmax_by(meta(torch.ones(2)))),
        ("alpha is empty", lambda: entmax_by(none)),
        ("alpha must be above 1 and at most 2, not 1$", lambda: entmax_by(torch.ones(2))),
        ("alpha must be above 1 and at most 2, not 2.5",
         lambda: entmax_by(torch.tensor([1.5, 2.5]))),
        ("alpha must be above 1 .* not nan", lambda: entmax_by(torch.tensor(math.nan))),
        ("half_steps must be odd, at least 1 and at most 999, not 2", lambda: sinkformer(steps=2)),
        ("half_steps .* not -1", lambda: sinkformer(steps=-1)),
        ("half_steps .* not 1001", lambda: sinkformer(steps=1001)),
        ("half_steps .* not 4294967297", lambda: sinkformer(steps=2**32 + 1)),
        ("gradient is 'exact'; it must be unrolled, implicit or truncated",
         lambda: sinkformer(q, q, 3, "exact")),
        ("query_lengths must be int64, not Int",
         lambda: sinkformer(query_lengths=lengths(3).int())),
        (r"query_lengths must be int64 \[1\]", lambda: sinkformer(query_lengths=lengths(3, 4))),
        ("query_lengths .* at most 10, not 11", lambda: sinkformer(query_lengths=lengths(11))),
        ("key_lengths .* at most 6, not 7",
         lambda: sinkformer(some, some, key_lengths=lengths(7))),
        ("key_lengths must be on q's device", lambda: sinkformer(key_lengths=meta(lengths(3)))),
        ("inputs must be 4 tensors, not 3", lambda: rows(q, q, q)),
        ("without alpha", lambda: rows(q, q, q, none, learns=True)),
        ("d_out must be", lambda: backward([q[:, :, 1:]], state)),
        ("index must be", lambda: backward([q], [state[1], state[1]])),
        ("weight must be", lambda: backward([q], [state[0], state[1][..., 1:]])),
        ("needs 2 tensors from index on, not 1", lambda: backward([q], state[:1])),
        ("needs 1 tensors from d_out on, not 0", lambda: backward([], state)),
    ]
