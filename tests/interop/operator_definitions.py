"""The PyTorch operators of libbirkhoff_ops.so in eager PyTorch, from their definitions."""

import functools
import math
import sys

import torch

BARRED = -math.inf


def check(good, what):
    if not good:
        sys.exit(f"FAILED: {what}")


def window(length, block, look_back, look_ahead, causal):
    """bool [L, L]: which keys each query sees."""
    token = torch.arange(length)
    distance = token[:, None] // block - token[None, :] // block
    seen = (distance <= look_back) & (distance >= -look_ahead)
    return seen & (token[None, :] <= token[:, None]) if causal else seen


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


@functools.cache
def dropout_factors(seed, p, shape):
    """The factors for probabilities [B, ...]: 0 or 1 / (1 - p), as cluster/base/random/philox.h
    draws them for attention dropout
    with seed 0, step `seed`, layer 0 and samples 0, 1, ..."""
    attention_dropout = 3
    words = philox(0, seed << 64 | attention_dropout)
    key = words[1] << 32 | words[0]
    count = math.prod(shape[1:])
    bits = [philox(key, row << 64 | i // 4)[i % 4] for row in range(shape[0]) for i in range(count)]
    uniform = ((torch.tensor(bits) >> 8) + 1) / 2**24
    return ((uniform > p) / (1 - p)).view(shape)


def probabilities(q, k, seen, bias=0):
    """Softmax over the visible keys; 0 for a query without visible keys."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return scores.masked_fill(~seen, -1e30).softmax(-1) * seen


def masked_attention(q, k, v, seen):
    return probabilities(q, k, seen.to(q.device)) @ v


def documents_of(segments, length, padded):
    """int64 [B, padded]: padding tokens belong to the last token's document."""
    if segments is None:
        return torch.zeros(1, padded, dtype=torch.int64)
    return torch.cat([segments, segments[:, -1:].expand(-1, padded - length)], 1).cpu()


def block_local_attention(q,
                          k,
                          v,
                          block,
                          look_back,
                          look_ahead,
                          causal,
                          *,
                          dropout=0.0,
                          seed=None,
                          key_lengths=None,
                          segments=None):
    B, H, L, D = q.shape
    block = min(block, L)  # dropout is drawn for existing tokens only
    look_back, look_ahead = (min(x, -(-L // block) - 1) for x in (look_back, look_ahead))
    seen = window(L, block, look_back, look_ahead, causal)[None]
    document = documents_of(segments, L, L)
    seen = seen & (document[:, :, None] == document[:, None])
    if key_lengths is not None:
        seen = seen & (torch.arange(L) < key_lengths.cpu()[:, None])[:, None]
    p = probabilities(q, k, seen[:, None].to(q.device))
    if dropout:
        width, token = (look_back + look_ahead + 1) * block, torch.arange(L)
        factors = dropout_factors(seed.item(), dropout, (B, H, -(-L // block), block, width))
        column = (token // block - token[:, None] // block + look_back) * block + token % block
        p = p * factors[:, :, token[:, None] // block, token[:, None] % block,
                        column.clamp(0, width - 1)].to(p)
    return p @ v


def sinkhorn(scores, iterations):
    """Divides columns, then rows, by their sums, in the log domain."""
    for _ in range(iterations):
        for dim in (-2, -1):
            empty = (scores == BARRED).all(dim, keepdim=True)
            scores = scores - scores.masked_fill(empty, 0).logsumexp(dim, keepdim=True).masked_fill(
                empty, 0)
    return scores.exp()


def balance(scores, iterations, form):
    if form == "full":
        return sinkhorn(scores, iterations)
    N = scores.shape[-1]
    rows = [torch.zeros_like(scores[..., 0, :])]
    for u in range(1, N):
        if form == "none":
            past = torch.cat(
                [scores[..., u, :u], torch.zeros_like(scores[..., u, :1])], -1).softmax(-1)[..., :u]
        else:  # prefix: destinations 1..u and sources 0..u-1 form a separate matrix
            taking_part = (scores != BARRED).tril(-1).any(-1, keepdim=True)
            past = sinkhorn(scores.masked_fill(~taking_part, BARRED)[..., 1:u + 1, :u],
                            iterations)[..., -1, :]
        rows.append(torch.nn.functional.pad(past, (0, N - u)))
    return torch.stack(rows, -2)


def open_pairs(block, exists, document):
    """bool [B, N, N]: pairs of blocks that are not padding, where the source is within one
    document, which is also the destination's."""
    exists, document = (x.unflatten(1, (-1, block)) for x in (exists, document))
    first = document[:, :, 0]
    whole = ((document == first[:, :, None]) | ~exists).all(-1)
    begun = exists[:, :, 0]
    return begun[:, :, None] & begun[:, None] & whole[:, None] & (first[:, :, None] == first[:,
                                                                                             None])


def tokens(length, block, key_lengths, segments):
    """bool and int64 [B, N b]: which tokens exist, and their documents."""
    padded = -(-length // block) * block
    lengths = torch.tensor([length]) if key_lengths is None else key_lengths.cpu()
    return torch.arange(padded)[None] < lengths[:, None], documents_of(segments, length, padded)


def sorted_attention(q,
                     k,
                     v,
                     weights,
                     block,
                     causal,
                     *,
                     combine="concat",
                     dropout=0.0,
                     seed=None,
                     key_lengths=None,
                     segments=None):
    B, H, L, D = q.shape
    block = min(block, L)
    exists, document = tokens(L, block, key_lengths, segments)
    visible = open_pairs(block, exists, document)
    visible = visible.tril(-1) if causal else visible
    exists, document = (x.unflatten(1, (-1, block)).to(q.device) for x in (exists, document))
    visible, here = visible.to(q.device), document == document[:, :, :1]
    weights = weights.masked_fill(~visible[:, None], 0)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, -L % block)).unflatten(2, (-1, block))
               for x in (q, k, v))
    k, v = (x * exists[:, None, :, :, None] for x in (k, v))
    # The part of a sorted key's weight that is on existing tokens.
    total = weights.sum(-1, keepdim=True)
    share = weights @ exists[:, None].to(weights) / total.masked_fill(total == 0, 1)
    if key_lengths is None and causal:
        share = torch.ones_like(share)
    there = share > 0
    share = share.masked_fill(~there, 1).to(q)
    sorted_k, sorted_v = (
        torch.einsum("bhuv,bhvtd->bhutd", weights.to(x), x) / share[..., None] for x in (k, v))
    bias = share.log()[:, :, :, None]
    sorting = (visible.any(-1)[:, :, None] & here)[:, None, :, :, None]
    sees_sorted = sorting & there[:, :, :, None]
    sees_own = (exists[:, :, None] & (document[:, :, :, None] == document[:, :, None]))[:, None]
    if causal:
        sees_own = sees_own & torch.ones(block, block, dtype=torch.bool, device=q.device).tril()
    keys = sorted_k
    if combine == "add_logits":
        keys, sees_sorted, sees_own = sorted_k + k, sees_sorted & sees_own, sees_own & ~sorting
    if combine == "add_outputs":
        p = torch.cat([probabilities(q, keys, sees_sorted, bias),
                       probabilities(q, k, sees_own)], -1)
    else:
        seen = torch.cat([x.expand(B, H, -1, block, block) for x in (sees_sorted, sees_own)], -1)
        p = probabilities(q, torch.cat([keys, k], 3), seen,
                          torch.cat([bias, torch.zeros_like(bias)], -1))
    if dropout:
        p = p * dropout_factors(seed.item(), dropout, tuple(p.shape)).to(p)
    return (p @ torch.cat([sorted_v, v], 3)).flatten(2, 3)[:, :, :L]
