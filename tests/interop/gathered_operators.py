"""Tests routing_attention, listed_block_attention and select_top_blocks, and the terms of logits
(grouped queries, relative positions, sinks) of all
operators. A part of pytorch_operators.py."""

import itertools
import math

import torch

from operator_definitions import check


def terms_of(heads, dim, rows, dtype, device):
    """Keyword arguments of all terms: tables for each head, and sinks."""
    make = lambda *sizes: torch.randn(*sizes, dtype=torch.float64).to(device, dtype)
    return {
        "relative_keys": make(heads, rows, dim),
        "relative_values": make(1, rows, dim).expand(heads, rows, dim).contiguous(),
        "sink": make(heads)
    }


def softmax_over(q, k, v, count, least=None, relative_keys=None, relative_values=None, sink=None):
    """Attention where query i sees key j count[.., i, j] times: [B, key heads, L, L]. `least` is
    the distance of the tables' first row."""
    group = q.shape[1] // k.shape[1]
    k, v, count = (x.repeat_interleave(group, 1) for x in (k, v, count.to(q)))
    scores = q @ k.mT
    token = torch.arange(q.shape[2], device=q.device)
    if relative_keys is not None:
        row = (token[None] - token[:, None] - least).clamp(0, relative_keys.shape[1] - 1)
        scores = scores + torch.einsum("bhid,hijd->bhij", q, relative_keys[:, row].expand(
            q.shape[1], -1, -1, -1))
    scores = (scores / math.sqrt(q.shape[-1])).masked_fill(count == 0, -math.inf)
    most = scores.amax(-1, keepdim=True) if sink is None else torch.maximum(
        scores.amax(-1, keepdim=True), sink[:, None, None].to(q))
    most = most.detach().masked_fill(most == -math.inf, 0)
    weight = count * (scores - most).exp()
    total = weight.sum(-1, keepdim=True)
    seen = (count > 0).any(-1, keepdim=True)
    if sink is not None:
        total = total + (sink[:, None, None] - most).exp() * seen
    p = weight / total.masked_fill(~seen, 1)
    out = p @ v
    if relative_values is not None:
        out = out + torch.einsum("bhij,hijd->bhid", p, relative_values[:, row].expand(
            q.shape[1], -1, -1, -1))
    return out


def documents(q, key_lengths, segments):
    """int64 [B, L]; -1: padding."""
    B, _, L, _ = q.shape
    ids = torch.zeros(B, L, dtype=torch.int64, device=q.device) if segments is None else segments
    return ids if key_lengths is None else ids.masked_fill(
        torch.arange(L, device=q.device) >= key_lengths[:, None], -(2**40))


def routing_attention(q,
                      k,
                      v,
                      centroids,
                      window,
                      selection,
                      *,
                      overlap="mean",
                      logit_scale=0.0,
                      key_lengths=None,
                      segments=None,
                      **terms):
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    B, H, L, D = q.shape
    key_heads = v.shape[1]
    uq, uk = unit(q), unit(q if k is None else k)
    grouped = unit(uq.unflatten(1, (key_heads, -1)).mean(2))
    document = documents(q, key_lengths, segments)
    exists = document >= -(2**32)
    token = torch.arange(L, device=q.device)
    together = ((document[:, :, None] == document[:, None]) & exists[:, :, None])[:, None, None]
    causal = token[:, None] >= token
    scores = [x.detach() @ centroids.mT for x in (grouped, uk)]
    nearest = [x.argmax(-1) for x in scores]
    clusters = range(centroids.shape[1])
    if selection == "causal_bucket":
        of_q, of_k = ((x[:, :, None] == torch.arange(len(clusters), device=q.device)[:, None])
                      for x in nearest)
    else:  # the tokens with the highest scores of each document
        chosen = []
        for x in scores:
            member = torch.zeros(B, key_heads, len(clusters), L, dtype=torch.bool, device=q.device)
            for b, h, c in itertools.product(range(B), range(key_heads), clusters):
                for d in document[b].unique().tolist():
                    inside = [i for i in range(L) if document[b, i] == d]
                    inside.sort(key=lambda i: -x[b, h, i, c].item())
                    member[b, h, c, inside[:window]] = True
            chosen.append(member)
        of_q, of_k = chosen
    seen = of_q[..., None] & of_k[:, :, :, None] & together  # [B, H, K, L, L]
    if selection != "encoder":
        seen = seen & causal
    if selection == "causal_bucket":  # the last ones up to the query
        seen = seen & (seen.flip(-1).cumsum(-1).flip(-1) <= window)
    if k is None and selection != "encoder":
        others = seen & ~torch.eye(L, dtype=torch.bool, device=q.device)
        seen = torch.where(others.any(2).any(-1)[:, :, None, :, None], others, seen)
    length = math.sqrt((logit_scale or math.sqrt(D)) * math.sqrt(D))
    least = terms and (1 - terms["relative_keys"].shape[1]) // (2 if selection == "encoder" else 1)
    call = lambda count: softmax_over(uq * length, uk * length, v, count, least, **terms)
    if overlap == "softmax":
        out = call(seen.sum(2))
    else:
        parts = seen.any(-1).to(q).repeat_interleave(H // key_heads, 1)
        out = sum(call(seen[:, :, c]) for c in clusters) / parts.sum(2).clamp_min(1)[..., None]
    squares = lambda x, cluster: (x - centroids[torch.arange(key_heads, device=q.device)[:, None],
                                                cluster]).square().sum(-1)
    distances = [(squares(x, c) * exists[:, None]).sum(-1) for x, c in zip((grouped, uk), nearest)]
    sums = torch.zeros(key_heads, len(clusters), D + 1, dtype=centroids.dtype, device=q.device)
    for x, c in list(zip((grouped, uk), nearest))[:1 if k is None else 2]:
        for h, cluster in itertools.product(range(key_heads), clusters):
            inside = (c[:, h] == cluster) & exists
            sums[h, cluster, :D] += x[:, h][inside].detach().sum(0)
            sums[h, cluster, D] += inside.sum()
    return out, distances[0] if k is None else distances[0] + distances[1], sums


def select_top_blocks(q, k, block, count, causal=True, *, key_lengths=None, segments=None):
    B, H, L, _ = k.shape
    q = q.unflatten(1, (H, -1)).mean(2)
    block, document = min(block, L), documents(k, key_lengths, segments)
    chosen = torch.full((B, H, L, count), -1, dtype=torch.int64, device=q.device)
    for b, h, i in itertools.product(range(B), range(H), range(L)):
        own, can = i // block, []
        for n in range(L // block):
            inside = document[b, n * block:(n + 1) * block]
            if (n < own if causal else n != own) and bool(
                (inside == document[b, i]).all()) and document[b, i] > -(2**32):
                can.append((-(q[b, h, i] @ k[b, h, n * block:(n + 1) * block].mean(0)).item(), n))
        best = [n for _, n in sorted(can)[:count]]
        chosen[b, h, i, :len(best)] = torch.tensor(best, dtype=torch.int64)
    return chosen


def listed_block_attention(q,
                           k,
                           v,
                           chosen,
                           block,
                           causal,
                           *,
                           key_lengths=None,
                           segments=None,
                           **terms):
    L, document = q.shape[2], documents(q, key_lengths, segments)
    of = torch.arange(L, device=q.device) // min(block, L)
    count = (chosen[..., None] == of).sum(3) + (of[:, None] == of)
    together = (document[:, :, None] == document[:, None]) & (document > -(2**32))[:, :, None]
    count = count * together[:, None]
    if causal:
        count = count.tril()
    least = terms and (1 - terms["relative_keys"].shape[1]) // (1 if causal else 2)
    return softmax_over(q, k, v, count, least, **terms)


def with_keywords(function, names, count):
    """A function of `count` tensors, then of the tensors of `names`."""
    return lambda *x: function(*x[:count], **dict(zip(names, x[count:])))


def unit_centroids(heads, clusters, dim, dtype, device):
    return torch.nn.functional.normalize(torch.randn(heads, clusters, dim, dtype=torch.float64),
                                         dim=-1).to(device, dtype)


def gathered_definitions(same, heads, device):
    """Routing and listed blocks against their definitions, with and without terms, documents,
    padding and grouped queries."""
    ops, count = torch.ops.birkhoff, 0
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        for length, key_heads in ((24, 4), (19, 2), (5, 1)):
            q = heads((2, 4, length, 6), dtype, device)
            k, v = (heads((2, key_heads, length, 6), dtype, device) for _ in range(2))
            centroids = unit_centroids(key_heads, 3, 6, dtype, device)
            masks = {
                "key_lengths": torch.tensor([length, length // 2 + 1], device=device),
                "segments": (torch.arange(length, device=device) // 7).expand(2, -1).contiguous()
            }
            terms = terms_of(4, 6, 5, dtype, device)
            for selection, overlap, shared in itertools.product(
                ("causal_bucket", "full_topw", "encoder"), ("mean", "softmax"), (False, True)):
                if shared and key_heads < 4:
                    continue
                for options, names in (({}, []), ({**masks, "logit_scale": 4.0}, list(terms))):
                    inputs = ([q, v] if shared else [q, k, v]) + [terms[name] for name in names]
                    plain = 2 if shared else 3
                    wrap = lambda call: lambda *x, **more: call(x[0], None, *x[1:], **more
                                                               ) if shared else call(*x, **more)
                    for which in (0, 1):
                        ours, theirs = (with_keywords(
                            wrap(lambda q, k, v, f=f, **more: f(q,
                                                                k,
                                                                v,
                                                                centroids,
                                                                4,
                                                                selection,
                                                                overlap=overlap,
                                                                **options,
                                                                **more)[which]), names, plain)
                                        for f in (ops.routing_attention, routing_attention))
                        same(
                            f"routing_attention {selection} {overlap}, shared {shared}, {names}, "
                            f"output {which}, {length} tokens in {dtype}",
                            ours, theirs, inputs, tolerance)
                        count += 1
                    call = lambda f: f(q,
                                       None if shared else k,
                                       v,
                                       centroids,
                                       4,
                                       selection,
                                       overlap=overlap,
                                       **options)[2]
                    error = (call(ops.routing_attention) -
                             call(routing_attention)).abs().max().item()
                    check(error < 1e-4, f"routing_attention's sums differ by {error:.1e}")
            for causal, some in itertools.product((True, False), ({}, masks)):
                chosen = ops.select_top_blocks(q, k, 4, 2, causal, **some)
                check(torch.equal(chosen, select_top_blocks(q, k, 4, 2, causal, **some)),
                      f"select_top_blocks, causal {causal}, {list(some)}")
                for names in ([], list(terms)):
                    ours, theirs = (with_keywords(
                        lambda q, k, v, f=f, **more: f(q, k, v, chosen, 4, causal, **some, **more),
                        names,
                        3) for f in (ops.listed_block_attention, listed_block_attention))
                    same(
                        f"listed_block_attention, causal {causal}, {names}, {list(some)}, {length} "
                        f"tokens in {dtype}",
                        ours, theirs, [q, k, v, *(terms[name] for name in names)], tolerance)
                    count += 1
            # Terms of the operators in blocks.
            token = torch.arange(length, device=device)
            for causal in (True, False):
                names, least = list(terms), -4 if causal else -2
                for block in (4, 8):
                    block = min(block, length)
                    near = (token[:, None] // block -
                            token // block).abs() <= 1 if not causal else (
                                (token[:, None] // block - token // block <= 1) &
                                (token[:, None] >= token))
                    same(
                        f"block_local_attention with terms of {length} tokens in {dtype}",
                        with_keywords(
                            lambda q, k, v, **more: ops.block_local_attention(
                                q, k, v, block, 1, 0 if causal else 1, causal, **more), names, 3),
                        with_keywords(
                            lambda q, k, v, **more: softmax_over(
                                q, k, v, near.expand(2, key_heads, -1, -1), least, **more), names,
                            3), [q, k, v, *terms.values()], tolerance)
                every = torch.ones(2, key_heads, length, length, device=device)
                every = every.tril() if causal else every
                for some in ([], ["sink"], names):
                    same(
                        f"dense_attention with {some} of {length} tokens in {dtype}",
                        with_keywords(
                            lambda q, k, v, **more: ops.dense_attention(q, k, v, causal, **more),
                            some, 3),
                        with_keywords(
                            lambda q, k, v, **more: softmax_over(q, k, v, every, least, **more),
                            some, 3), [q, k, v, *(terms[name] for name in some)], tolerance)
                # Grouped queries are queries whose keys are repeated; sorted blocks have no
                # relative positions.
                N = -(-length // 4)
                weights = torch.rand(2, key_heads, N, N, dtype=torch.float64).to(device, dtype)
                repeated = lambda x: x.repeat_interleave(4 // key_heads, 1)
                same(
                    f"sorted_attention of grouped queries in {dtype}",
                    lambda q, k, v, w: ops.sorted_attention(q, k, v, w, 4, causal),
                    lambda q, k, v, w: ops.sorted_attention(q, *map(repeated,
                                                                    (k, v, w)), 4, causal),
                    [q, k, v, weights], tolerance)
                # Without weights nothing is sorted.
                none = torch.zeros_like(weights)
                own = (token[:, None] // 4
                       == token // 4) & (token[:, None] >= token if causal else True)
                if causal:
                    same(
                        f"sorted_attention's own block with terms in {dtype}",
                        with_keywords(
                            lambda q, k, v, **more: ops.sorted_attention(
                                q, k, v, none, 4, causal, combine="add_outputs", **more), names[:2],
                            3),
                        with_keywords(
                            lambda q, k, v, **more: softmax_over(
                                q, k, v, own.expand(2, key_heads, -1, -1), least, **more) +
                            softmax_over(q, k * 0, v * 0, own.expand(2, key_heads, -1, -1)),
                            names[:2], 3),
                        [q, k, v, terms["relative_keys"], terms["relative_values"]], tolerance)
                count += 7
    print(
        f"{count} results of routing, listed blocks and terms of logits agree with their "
        "definitions"
    )


def gathered_meaning(heads, device):
    """causal_bucket and MoBA do not read later tokens; full_topw does. On a GPU LibTorch computes
    fp64, and its sums round differently
    for lists of other lengths."""
    ops = torch.ops.birkhoff
    q, k, v = (heads((1, 2, 40, 8), torch.float64, device) for _ in range(3))
    centroids = unit_centroids(2, 4, 8, torch.float64, device)
    moba = lambda q, k, v: ops.listed_block_attention(q, k, v, ops.select_top_blocks(q, k, 8, 2), 8)
    leaks = {}
    for name, call in {
            "causal_bucket": lambda *x: ops.routing_attention(*x, centroids, 6)[0],
            "full_topw": lambda *x: ops.routing_attention(*x, centroids, 6, "full_topw")[0],
            "MoBA": moba
    }.items():
        plain, leaks[name] = call(q, k, v), False
        for token in range(1, 40):
            later = [
                torch.cat([x[:, :, :token], torch.randn_like(x[:, :, token:])], 2)
                for x in (q, k, v)
            ]
            difference = (call(*later) - plain)[:, :, :token].abs().max().item()
            leaks[name] |= not difference <= (0 if device == "cpu" else 1e-10)
    check(leaks == {
        "causal_bucket": False,
        "full_topw": True,
        "MoBA": False
    }, f"which operators read later tokens: {leaks}")
    one = torch.nn.functional.normalize(torch.randn(2, 1, 8, dtype=torch.float64, device=device),
                                        dim=-1)
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1) * 8**0.5
    error = (ops.routing_attention(q, k, v, one, 40, "full_topw")[0] -
             ops.dense_attention(unit(q), unit(k), v)).abs().max().item()
    check(error < 1e-12, f"one cluster of all tokens is not dense attention: {error:.1e}")
    print(
        "causal_bucket and MoBA never read later tokens, full_topw does; one cluster of all tokens "
        "is dense attention"
    )


def gathered_cases(heads, device):
    """As cases() of pytorch_operators.py."""
    leaf = lambda x: x.detach().requires_grad_()
    for length in (8, 7):
        make = lambda count: leaf(heads((1, count, length, 3), torch.float64, device))
        terms = terms_of(2, 3, 3, torch.float64, device)
        masks = {
            "key_lengths": torch.tensor([6], device=device),
            "segments": (torch.arange(length, device=device) >= 3).long()[None]
        }
        centroids = unit_centroids(1, 3, 3, torch.float64, device)
        for selection, options in (("causal_bucket", {}), ("full_topw", {
                "overlap": "softmax"
        }), ("encoder", {
                **masks,
                **terms
        }), ("causal_bucket", {
                **masks,
                **terms
        })):
            yield "routing_attention", (make(2), make(1), make(1), centroids, 3, selection), options
        yield "routing_attention", (make(2), None, make(2),
                                    unit_centroids(2, 2, 3, torch.float64, device), 3), {
                                        "logit_scale": 2.0
                                    }
        q, k = make(2), make(1)
        yield "select_top_blocks", (q, k, 2, 2, False), masks
        chosen = torch.ops.birkhoff.select_top_blocks(q, k, 2, 2)
        yield "listed_block_attention", (q, k, make(1), chosen, 2), {}
        yield "listed_block_attention", (make(2), make(1), make(1), chosen, 2, True), {
            **masks,
            **terms
        }
        yield "block_local_attention", (make(2), make(1), make(1), 4, 1), terms
        yield "dense_attention", (make(2), make(1), make(1), False), {"sink": terms["sink"]}
        yield "sorted_attention", (make(2), make(1), make(1),
                                   leaf(
                                       torch.rand(1,
                                                  1,
                                                  -(-length // 2),
                                                  -(-length // 2),
                                                  dtype=torch.float64,
                                                  device=device)), 2), terms


def gathered_refusals():
    """(message, call) of wrong arguments."""
    ops = torch.ops.birkhoff
    q, one, meta = torch.randn(1, 2, 10, 4), torch.randn(1, 1, 10, 4), lambda x: x.to("meta")
    unit = unit_centroids(2, 3, 4, torch.float32, "cpu")
    chosen = torch.zeros(1, 2, 10, 1, dtype=torch.int64)
    route = (lambda q=q, k=q, v=q, centroids=unit, window=4, *arguments, **options:
             ops.routing_attention(q, k, v, centroids, window, *arguments, **options))
    listed = (lambda q=q, k=q, v=q, chosen=chosen, block=4, *arguments, **options:
              ops.listed_block_attention(q, k, v, chosen, block, *arguments, **options))
    choose = lambda q=q, k=q, block=4, count=1, **options: ops.select_top_blocks(
        q, k, block, count, **options)
    table, sink = torch.randn(2, 3, 4), torch.randn(2)
    local = lambda **options: ops.block_local_attention(q, q, q, 4, **options)
    none = torch.zeros(0)
    return [
        ("multiple of their heads, not",
         lambda: route(k=q.repeat(1, 2, 1, 1), v=q.repeat(1, 2, 1, 1))),
        ("k and v must be like q", lambda: route(k=one)),
        ("k and v must be like q", lambda: listed(v=q[:, :, 1:])),
        ("without k, v must have q's 2 heads, not 1", lambda: route(k=None, v=one)),
        ("k must be", lambda: listed(k=none)),
        ("v must be", lambda: route(v=none)),
        ("k must be", lambda: ops.block_local_attention(q, none, q, 4)),
        (r"centroids must be \[H, K, D\], not", lambda: route(centroids=unit[0])),
        (r"centroids must be \[2, K, 4\]", lambda: route(centroids=unit[:1])),
        (r"centroids must be \[2, K, 4\]", lambda: route(centroids=unit[:, :0])),
        ("centroids must be Float, not Double", lambda: route(centroids=unit.double())),
        ("centroids must be on q's device", lambda: route(centroids=meta(unit))),
        ("window must be at least 1 and at most 1048576, not 0", lambda: route(window=0)),
        ("window .* not 4611686018427387904", lambda: route(window=1 << 62)),
        ("selection is 'prefix_topw'; it must be causal_bucket, full_topw or encoder",
         lambda: route(q, q, q, unit, 4, "prefix_topw")),
        ("overlap is 'sum'; it must be mean or softmax", lambda: route(overlap="sum")),
        ("logit_scale must be 0 .* not -1", lambda: route(logit_scale=-1.0)),
        ("logit_scale must be .* not nan", lambda: route(logit_scale=math.nan)),
        ("key_lengths .* at most 10, not 11", lambda: route(key_lengths=torch.tensor([11]))),
        ("segments must never decrease",
         lambda: listed(segments=torch.tensor([[1] * 5 + [0] * 5]))),
        ("chosen must be Long, not Int", lambda: listed(chosen=chosen.int())),
        (r"chosen must be \[B, H, L, C\]", lambda: listed(chosen=chosen[0])),
        (r"chosen must be \[1, 2, 10, C\]", lambda: listed(chosen=chosen[:, :1])),
        ("chosen must be at least -1 and at most 2, not 3", lambda: listed(chosen=chosen + 3)),
        ("chosen .* not -2", lambda: listed(chosen=chosen - 2)),
        ("chosen must be on q's device", lambda: listed(chosen=meta(chosen))),
        ("block must be at least 1", lambda: listed(q, q, q, chosen, 0)),
        ("block must be at least 1", lambda: choose(block=0)),
        ("count must be at least 0 and at most 1048576, not -1", lambda: choose(count=-1)),
        ("k and v must be like q", lambda: choose(k=q[:, :, 1:])),
        ("q, k and v must have one dtype", lambda: choose(k=q.double())),
        (r"relative_keys must be \[H or 1, R, D\]", lambda: local(relative_keys=table[0])),
        (r"relative_keys must be \[2 or 1, R, 4\]", lambda: local(relative_keys=table[..., 1:])),
        (r"relative_keys must be \[2 or 1, R, 4\]", lambda: route(relative_keys=table[:, :0])),
        ("relative_keys must be Float, not Double", lambda: local(relative_keys=table.double())),
        ("odd number of rows",
         lambda: ops.block_local_attention(q, q, q, 4, 0, 0, False, relative_keys=table[:, 1:])),
        ("relative_values must be like relative_keys",
         lambda: local(relative_keys=table, relative_values=table[:, 1:])),
        ("relative_values need relative_keys", lambda: local(relative_values=table)),
        (r"sink must be \[2\]", lambda: ops.dense_attention(q, q, q, sink=sink[:1])),
        ("sink must be on q's device", lambda: ops.dense_attention(q, q, q, sink=meta(sink))),
        ("'add_logits' has no relative positions", lambda: ops.sorted_attention(
            q, q, q, torch.rand(1, 2, 3, 3), 4, combine="add_logits", relative_keys=table)),
    ]
