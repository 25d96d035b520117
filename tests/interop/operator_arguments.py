"""Arguments that the operators must refuse, each with its limit, and extreme sizes and layouts that
they must accept. A part of
pytorch_operators.py."""

import math
import re

import torch

import all_pairs_operators
import gathered_operators
import pattern_operators
from operator_definitions import check


def refusals():
    ops = torch.ops.birkhoff
    q, scores = torch.randn(1, 2, 10, 4), torch.randn(1, 2, 3, 3)
    one, lengths, rows = torch.tensor([1]), lambda *x: torch.tensor(x), lambda *x: torch.tensor([x])
    meta = lambda x: x.to("meta")
    local = lambda *arguments, q=q, k=None, v=None, **options: ops.block_local_attention(
        q, q if k is None else k, q if v is None else v, *(arguments or (4,)), **options)
    sorted_by = lambda weights=scores, block=4, **options: ops.sorted_attention(
        q, q, q, weights, block, **options)
    sinkhorn_by = lambda scores=scores, block=4, *arguments, **options: ops.sinkhorn_attention(
        q, q, q, scores, block, *arguments, **options)
    inputs, result = [q, q, q] + [torch.zeros(0)] * 3, torch.zeros(2, 1, 2, 3, 4)
    window = (4, 0, 0, True, "concat", 0.0, None, None, None)
    forward = ops._attention_in_blocks
    backward = (lambda d_out=q, inputs=inputs, out=q, softmax=result:
                ops._attention_in_blocks_backward([d_out], inputs, [out, softmax], *window))
    solved = torch.ones(1, 2, 3, 1, dtype=torch.bool)
    balance_backward = (lambda d=scores, s=scores, solved=solved, iterations=5, form="prefix":
                        ops._sinkhorn_balance_backward([d], [s], [solved], iterations, form))
    most = 2**20
    table = [
        # Sizes, types and devices of q, k, v and weights.
        ("q must be", lambda: local(q=q[0])),
        ("none of them 0", lambda: local(q=q[:, :, :0])),
        ("none of them 0", lambda: local(q=q[..., :0])),
        ("none of them 0", lambda: ops.open_block_pairs(q[:0], 4)),
        ("k must be", lambda: local(k=q[0])),
        ("k and v must be like q", lambda: local(k=q[:, :, 1:])),
        ("k and v must be like q", lambda: local(v=q[..., 1:])),
        ("k and v must be like q",
         lambda: ops.dense_attention(q, q[:, :, 1:], q[:, :, 1:], False, key_lengths=one)),
        ("one dtype, not Float, Double and Float", lambda: local(k=q.double())),
        ("one dtype", lambda: ops.dense_attention(q, q.half(), q)),
        ("q must be float32, .* not Long", lambda: local(q=q.long())),
        ("q must be float32, .* not Bool", lambda: ops.dense_attention(q > 0, q > 0, q > 0)),
        ("q must be float32, .* not ComplexFloat", lambda: local(q=q.to(torch.complex64))),
        ("k must be on q's device, cpu, not on meta", lambda: local(k=meta(q))),
        ("v must be on q's device, cpu, not on meta", lambda: ops.dense_attention(q, q, meta(q))),
        ("on q's device, cpu, not on meta", lambda: sorted_by(meta(scores))),
        (r"must be \[1, 2, 3, 3\]", lambda: sorted_by(scores[:, :, 1:])),
        (r"must be \[1, 2, 3, 3\]", lambda: sorted_by(scores[:, :1])),
        (r"must be \[B, H, N, N\]", lambda: sorted_by(scores[0])),
        ("block weights .* float32, .* not Int", lambda: sorted_by(scores.int())),
        (r"must be \[1, 2, 3, 3\]", lambda: sinkhorn_by(scores[..., :2, :2])),
        ("with N = 3", lambda: sinkhorn_by(scores[..., :2, :2], key_lengths=lengths(3))),
        # Blocks and windows.
        ("block must be at least 1 and at most 1048576, not 0", lambda: local(0)),
        ("block .* not -1", lambda: local(-1)),
        ("block .* not 1048577", lambda: local(most + 1)),
        ("block .* not 4611686018427387904", lambda: local(1 << 62)),
        ("block .* not 9223372036854775807", lambda: local(2**63 - 1)),
        ("block .* not 0", lambda: sorted_by(block=0)),
        ("block .* not 4611686018427387904", lambda: sorted_by(block=1 << 62)),
        ("block .* not 0", lambda: sinkhorn_by(block=0, key_lengths=lengths(3))),
        ("block .* not 4611686018427387904", lambda: sinkhorn_by(block=1 << 62)),
        ("block .* not 0", lambda: ops.open_block_pairs(q, 0)),
        ("block .* not 4611686018427387904", lambda: ops.open_block_pairs(q, 1 << 62)),
        ("block .* not 0", lambda: local(0, q=meta(q))),
        ("block .* not 4611686018427387904", lambda: local(1 << 62, q=meta(q))),
        ("block .* not 4611686018427387904", lambda: ops.open_block_pairs(meta(q), 1 << 62)),
        ("look_back must be at least 0 and at most 1048576, not 1099511627776",
         lambda: local(4, 1 << 40)),
        ("look_back .* not -1", lambda: local(4, -1)),
        ("look_back .* not -9223372036854775808", lambda: local(4, -(2**63))),
        ("look_back .* not 1099511627776", lambda: local(4, 1 << 40, q=meta(q))),
        ("look_ahead .* at most 1048576, not 1099511627776", lambda: local(4, 0, 1 << 40, False)),
        ("look_ahead .* not -1", lambda: local(4, 0, -1, False)),
        ("look_ahead must be 0 where attention is causal, not 1", lambda: local(4, 0, 1, True)),
        # Padding and documents.
        (r"key_lengths must be int64 \[1\]", lambda: local(key_lengths=lengths(3, 4))),
        ("key_lengths must be int64, not Int", lambda: local(key_lengths=one.int())),
        ("key_lengths must be on q's device", lambda: local(key_lengths=meta(one))),
        ("key_lengths must be at least 0 and at most 10, not -1",
         lambda: local(key_lengths=lengths(-1))),
        ("key_lengths .* at most 10, not 11", lambda: local(key_lengths=lengths(11))),
        ("key_lengths .* not -1", lambda: ops.dense_attention(q, q, q, key_lengths=lengths(-1))),
        ("key_lengths .* not 11", lambda: ops.dense_attention(q, q, q, key_lengths=lengths(11))),
        ("key_lengths .* not 11", lambda: sorted_by(key_lengths=lengths(11))),
        ("key_lengths .* not -9223372036854775808",
         lambda: sinkhorn_by(key_lengths=lengths(-(2**63)))),
        ("key_lengths .* not 11", lambda: ops.open_block_pairs(q, 4, key_lengths=lengths(11))),
        ("segments must be int64", lambda: local(segments=torch.zeros(1, 10))),
        (r"segments must be int64 \[1, 10\]", lambda: local(segments=rows(*range(9)))),
        (r"segments must be int64 \[1, 10\]", lambda: local(segments=lengths(*range(10)))),
        ("segments must never decrease along a row, but row 0 falls from 5 to 4 at token 6",
         lambda: local(segments=rows(0, 1, 2, 3, 4, 5, 4, 5, 6, 7))),
        ("segments .* row 0 falls from 1 to 0 at token 9",
         lambda: sorted_by(segments=rows(*[1] * 9, 0))),
        ("segments .* falls from 1 to -1 at token 1",
         lambda: ops.dense_attention(q, q, q, segments=rows(1, *[-1] * 9))),
        ("segments .* falls from 1 to 0 at token 9",
         lambda: ops.open_block_pairs(q, 4, segments=rows(*[1] * 9, 0))),
        # Dropout.
        ("needs a seed", lambda: local(dropout=0.5)),
        ("seed must be int64", lambda: local(dropout=0.5, seed=torch.ones(1))),
        ("seed must have one element", lambda: local(dropout=0.5, seed=lengths(1, 2))),
        ("seed must have one element", lambda: local(seed=lengths(1, 2))),
        ("seed must have one element", lambda: local(dropout=0.5, seed=lengths()[:0].long())),
        ("seed must be on q's device", lambda: local(dropout=0.5, seed=meta(one))),
        ("dropout must be in .* not 1$", lambda: local(dropout=1.0, seed=one)),
        ("dropout must be in .* not -0.1", lambda: local(dropout=-0.1, seed=one)),
        ("dropout must be in .* not nan", lambda: local(dropout=math.nan, seed=one)),
        ("dropout must be in .* not inf",
         lambda: ops.dense_attention(q, q, q, dropout=math.inf, seed=one)),
        ("dropout must be in", lambda: local(dropout=1 - 1e-12, seed=one)),
        ("dropout must be in .* not 2", lambda: local(dropout=2.0, seed=meta(one), q=meta(q))),
        # Balances.
        ("combine is 'both'", lambda: sinkhorn_by(combine="both")),
        ("combine is ''", lambda: sorted_by(combine="")),
        ("full, prefix", lambda: ops.sinkhorn_balance(scores, 5, "sideways")),
        ("full, prefix", lambda: sinkhorn_by(scores, 4, "Prefix")),
        ("full, prefix", lambda: ops.sinkhorn_balance(meta(scores), 5, "sideways")),
        ("iterations must be at least 1 and at most 1000, not 0",
         lambda: ops.sinkhorn_balance(scores, 0)),
        ("iterations .* not -1", lambda: ops.sinkhorn_balance(scores, -1)),
        ("iterations .* not 1001", lambda: ops.sinkhorn_balance(scores, 1001, "none")),
        ("iterations .* not 10000000", lambda: ops.sinkhorn_balance(scores, 10**7)),
        ("iterations .* not 10000000", lambda: ops.sinkhorn_balance(scores, 10**7, "full")),
        ("iterations .* not 10000000", lambda: ops.sinkhorn_balance(scores, 10**7, "cumulative")),
        ("iterations .* not 10000000", lambda: ops.sinkhorn_balance(meta(scores), 10**7)),
        ("iterations .* not 10000000", lambda: sinkhorn_by(scores, 4, "prefix", 10**7)),
        ("float32 or float64", lambda: ops.sinkhorn_balance(scores.bfloat16())),
        ("float32 or float64", lambda: sinkhorn_by(scores.bfloat16())),
        ("float32 or float64", lambda: ops.sinkhorn_balance(scores.long())),
        (r"scores must be \[B, H, N, N\]", lambda: ops.sinkhorn_balance(scores[0])),
        (r"scores must be \[B, H, N, N\]", lambda: ops.sinkhorn_balance(scores[..., 1:])),
        (r"scores must be \[B, H, N, N\]", lambda: ops.sinkhorn_balance(scores[..., :0, :0])),
        ("'prefix' takes at most 256 blocks, not 257",
         lambda: ops.sinkhorn_balance(torch.zeros(1, 1, 257, 257))),
        # The private operators.
        ("not 5 tensors", lambda: forward([q] * 5, *window)),
        ("not 2 tensors", lambda: forward([q] * 2, *window)),
        ("d_out must be", lambda: backward(d_out=q[:, :, 1:])),
        ("d_out must be", lambda: backward(d_out=q.double())),
        ("out must be", lambda: backward(out=q[..., 1:])),
        ("softmax must be", lambda: backward(softmax=result[:1])),
        ("softmax must be", lambda: backward(softmax=result.double())),
        ("not 1 tensors", lambda: backward(inputs=[q])),
        ("d_weights must be", lambda: balance_backward(d=scores[..., 1:])),
        ("d_weights must be", lambda: balance_backward(d=scores.double())),
        ("solved must be", lambda: balance_backward(solved=solved[:, :, 1:])),
        ("solved must be", lambda: balance_backward(solved=solved.int())),
        ("iterations .* not 10000000", lambda: balance_backward(iterations=10**7)),
        ("inputs must be scores, not 2 tensors",
         lambda: ops._sinkhorn_balance([scores] * 2, 5, "full")),
        *gathered_operators.gathered_refusals(),
        *all_pairs_operators.all_pairs_refusals(),
        *pattern_operators.pattern_refusals(),
    ]
    for what, call in table:
        try:
            call()
        except ValueError as error:
            check(re.search(what, str(error)), f"'{error}' does not mention '{what}'")
            check("\n" not in str(error), f"more than one line: '{error}'")
        else:
            check(False, f"no ValueError about '{what}'")
    leaf = q.double().requires_grad_()
    for call in (lambda x: ops.block_local_attention(x, x, x, 5),
                 lambda x: ops.top_k_attention(x, x, x, 3), lambda x: ops.entmax_attention(x, x, x),
                 lambda x: ops.sinkformer_attention(x, x, x),
                 lambda x: ops.sparse_transformer_attention(x, x, x, 3)):
        (gradient,) = torch.autograd.grad(call(leaf).sum(), leaf, create_graph=True)
        try:
            gradient.sum().backward()
        except RuntimeError as error:
            check("not implemented" in str(error), f"second gradient: {error}")
        else:
            check(False, "a second gradient was returned, although none is implemented")
    print(f"{len(table)} wrong arguments, and second gradients, are refused with a message")


def extremes():
    """The largest, smallest and most unusual legal arguments give the same results as the plain
    call."""
    ops = torch.ops.birkhoff
    q, k, v = (torch.randn(2, 2, 10, 4, dtype=torch.float64) for _ in range(3))
    scores = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    equal = lambda name, a, b: check(torch.equal(a, b), f"{name}: another result")
    near = lambda name, a, b: check(bool((a - b).abs().max() < 1e-12), f"{name}: another result")
    most = 2**20
    near("a block longer than the sequence", ops.block_local_attention(q, k, v, most),
         ops.dense_attention(q, k, v))
    near("a window longer than the sequence", ops.block_local_attention(q, k, v, 3, most),
         ops.dense_attention(q, k, v))
    near("a window on both sides", ops.block_local_attention(q, k, v, 3, most, most, False),
         ops.dense_attention(q, k, v, False))
    masks = {
        "key_lengths": torch.tensor([10, 7]),
        "segments": torch.tensor([[0] * 4 + [1] * 6] * 2)
    }
    near("a masked window", ops.block_local_attention(q, k, v, 3, most, **masks),
         ops.dense_attention(q, k, v, **masks))
    check(
        bool((ops.block_local_attention(q, k, v, 4, key_lengths=torch.tensor([0, 0])) == 0).all()),
        "keys where there are none")
    negative = {"segments": torch.tensor([[-(2**63)] * 4 + [-1] * 6] * 2)}
    for name, call in (
        ("block_local_attention",
         lambda *x, **options: ops.block_local_attention(*x, 3, 1, 1, False, **options)),
        ("sorted_attention",
         lambda *x, **options: ops.sorted_attention(*x, scores.abs(), 4, False, **options))):
        equal(f"{name} of negative documents", call(q, k, v, **negative),
              call(q, k, v, segments=masks["segments"]))
        expanded = q[:1, :1, :1].expand(q.shape)
        equal(f"{name} of one row for all", call(expanded, expanded, expanded),
              call(*[expanded.contiguous()] * 3))
        strided = lambda x: torch.stack([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[
            ..., 0]
        equal(f"{name} of numbers apart", call(*map(strided, (q, k, v))), call(q, k, v))
        seeds = torch.tensor([[5, 6]])[:, 1:]
        equal(f"{name} with a part of a tensor as seed", call(q, k, v, dropout=0.5, seed=seeds),
              call(q, k, v, dropout=0.5, seed=torch.tensor(6)))
    for form in ("full", "prefix", "cumulative", "none"):
        turned = scores.mT.contiguous().mT
        equal(f"scores by columns ({form})", ops.sinkhorn_balance(turned, 3, form),
              ops.sinkhorn_balance(scores, 3, form))
        check(bool(ops.sinkhorn_balance(scores, 1000, form).isfinite().all()),
              f"1000 iterations ({form})")
    print("the largest blocks and windows, and unusual layouts, give the results of plain calls")
