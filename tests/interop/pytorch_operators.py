"""Tests libbirkhoff_ops.so as a user of PyTorch would use it: each operator against its definition
in eager PyTorch, torch.autograd.gradcheck, torch.library.opcheck, and the module of docs/pytorch.md
in a training loop, eager and compiled.

    python pytorch_operators.py --library build/cpu/libbirkhoff_ops.so [--full] [--device cuda]

Without --full, gradcheck and opcheck take one case of each operator, and nothing is compiled.
Ends with 0 if all checks pass, and with 77 (ctest: skipped) if Python has no PyTorch, or a version
other than --torch."""

import argparse
import math
import os
import pathlib
import sys

# LibTorch's wheel is linked with GPU libraries that a CPU needs none of: ctest gives empty ones.
sys.setdlopenflags(os.RTLD_LAZY)

# PyTorch's cache of compiled graphs ignores the signatures of our operators, so a changed signature
# would not be noticed.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

try:
    import torch
    import functorch.compile  # noqa: F401 - opcheck needs it; it tests the wheel's requirements
except Exception as error:  # no PyTorch, or one without the libraries that it requires
    print(f"SKIPPED: import torch: {error}")
    sys.exit(77)

# After PyTorch, which may be missing.
from all_pairs_operators import (  # noqa: E402
    all_pairs_cases, all_pairs_compiled, all_pairs_definitions, all_pairs_meaning, private_calls)
from documented_modules import documented_modules, training  # noqa: E402
from gathered_operators import (  # noqa: E402
    gathered_cases, gathered_definitions, gathered_meaning)
from operator_arguments import extremes, refusals  # noqa: E402
from operator_definitions import (  # noqa: E402
    BARRED, check, window, masked_attention, block_local_attention, balance,
    open_pairs, tokens, sorted_attention)
from pattern_operators import (  # noqa: E402
    pattern_calls, pattern_cases, pattern_definitions, pattern_meaning)

# ---- Checks.


def same(name, ours, theirs, inputs, tolerance):
    """Compares the results and gradients of ours(*inputs) and theirs(*inputs)."""
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        out.backward(
            torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape))
        results.append(
            [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)])
    for i, (mine, other) in enumerate(zip(*results)):
        error = (mine - other).abs().max() / other.abs().max().clamp_min(
            1e-3)  # smaller values are rounding errors: weights of a single source have gradient 0
        check(
            error <= tolerance,
            f"{name}: {'result' if i == 0 else f'gradient {i - 1}'} differs by {error:.1e} (bound "
            f"{tolerance:.1e})"
        )


def heads(shape, dtype, device):
    """Random heads in the layout of a layer: a view of [B, L, H, D]."""
    B, H, L, D = shape
    return torch.randn(B, L, H, D, dtype=torch.float64).transpose(1, 2).to(device, dtype)


def definitions(device):
    """Each operator against its definition. fp64 tests the formulas; fp32 and bf16 test that their
    paths compute the same."""
    ops, count = torch.ops.birkhoff, 0
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 3e-5), (torch.bfloat16, 0.05)):
        for length, block in ((32, 8), (19, 8), (5, 8)):
            q, k, v = (heads((2, 3, length, 5), dtype, device) for _ in range(3))
            for look_back, look_ahead, causal in ((0, 0, True), (1, 0, True), (2, 0, True),
                                                  (0, 0, False), (1, 1, False), (0, 2, False)):
                arguments = (block, look_back, look_ahead, causal)
                same(f"block_local_attention{arguments} of {length} tokens in {dtype}",
                     lambda *x: ops.block_local_attention(*x, *arguments),
                     lambda *x: masked_attention(*x, window(length, *arguments)), (q, k, v),
                     tolerance)
                count += 1
            N = -(-length // block)
            scores = 2 * torch.randn(2, 3, N, N, dtype=torch.float64).to(
                device, dtype if dtype == torch.float64 else torch.float32)
            for form in ("full", "prefix", "none"):
                same(
                    f"sinkhorn_attention {form} of {length} tokens in {dtype}",
                    lambda *x: ops.sinkhorn_attention(*x, block, form, 3),
                    lambda *x: sorted_attention(*x[:3],
                                                balance(x[3], 3, form).to(dtype), block, form !=
                                                "full"), (q, k, v, scores), tolerance)
                count += 1
            # The weights of a block itself and of later blocks do not matter.
            same(f"sorted_attention of any weights and {length} tokens in {dtype}",
                 lambda *x: ops.sorted_attention(*x, block, True),
                 lambda *x: sorted_attention(*x, block, True), (q, k, v, scores.to(dtype)),
                 tolerance)
            count += 1
            # Padding, documents, dropout and combine.
            lengths = torch.tensor([length, length // 2 + 1], device=device)
            token = torch.arange(length, device=device)
            segments = torch.stack([(token >= 3) * 4, (token >= length // 2 // block * block) + 1])
            seed = torch.tensor([length * 2**40 + 7], device=device)
            everything = {
                "key_lengths": lengths,
                "segments": segments,
                "dropout": 0.25,
                "seed": seed
            }
            choices = [everything]
            if dtype == torch.float64:
                choices += [{
                    "key_lengths": lengths
                }, {
                    "segments": segments
                }, {
                    "dropout": 0.25,
                    "seed": seed
                }]
            for options in choices:
                for arguments in ((block, 1, 0, True), (block, 1, 1, False)):
                    same(
                        f"block_local_attention{arguments} with {list(options)} of {length} tokens "
                        f"in {dtype}",
                        lambda *x: ops.block_local_attention(*x, *arguments, **options),
                        lambda *x: block_local_attention(*x, *arguments, **options), (q, k, v),
                        tolerance)
                for combine in ("concat", "add_outputs", "add_logits"):
                    for causal in (True, False):
                        same(
                            f"sorted_attention {combine}, causal {causal}, with {list(options)} of "
                            f"{length} tokens in {dtype}",
                            lambda *x: ops.sorted_attention(
                                *x, block, causal, combine=combine, **options), lambda *x:
                            sorted_attention(*x, block, causal, combine=combine, **options),
                            (q, k, v, scores.to(dtype).abs()), tolerance)
                for causal in (True, False):
                    same(
                        f"dense_attention, causal {causal}, with {list(options)} of {length} "
                        f"tokens in {dtype}",
                        lambda *x: ops.dense_attention(*x, causal, **options),
                        lambda *x: block_local_attention(*x, length, 0, 0, causal, **options),
                        (q, k, v), tolerance)
                count += 10
            open = open_pairs(block, *tokens(length, block, lengths, segments)).to(device)[:, None]
            check(
                torch.equal(open,
                            ops.open_block_pairs(q, block, key_lengths=lengths, segments=segments)),
                "open_block_pairs")
            for form in ("full", "prefix", "none"):
                same(
                    f"sinkhorn_attention {form} with all options of {length} tokens in {dtype}",
                    lambda *x: ops.sinkhorn_attention(
                        *x, block, form, 3, combine="add_outputs", **everything), lambda *x:
                    sorted_attention(*x[:3],
                                     balance(x[3].masked_fill(~open, BARRED), 3, form).to(dtype),
                                     block,
                                     form != "full",
                                     combine="add_outputs",
                                     **everything), (q, k, v, scores), tolerance)
                count += 1
    # The form `cumulative` has no short definition. The checks are that it is causal and that each
    # row sums to less than 1.
    scores = torch.randn(1, 2, 6, 6, dtype=torch.float64, device=device)
    weights = ops.sinkhorn_balance(scores, 4, "cumulative")
    later = scores.clone()
    later[:, :, 4:] += 1
    check(torch.equal(weights[:, :, :4],
                      ops.sinkhorn_balance(later, 4, "cumulative")[:, :, :4]),
          "cumulative reads later rows")
    check(
        bool((weights.sum(-1) < 1).all()) and bool((weights.triu() == 0).all()),
        "cumulative: rows are not shares of earlier blocks")
    q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.float64, device=device)
               for length in (150, 70, 70))
    same("dense_attention", lambda *x: ops.dense_attention(*x),
         lambda *x: masked_attention(*x, window(150, 150, 0, 0, True)), (q, q, q), 1e-11)
    same("dense_attention to other keys", lambda *x: ops.dense_attention(*x, False), lambda q, k, v:
         (q @ k.mT / 2).softmax(-1) @ v, (q, k, v), 1e-11)
    print(f"{count + 3} results with their gradients agree with the definitions in eager PyTorch")


def meaning(device):
    """The purpose of padding, documents and dropout, independent of their formulas."""
    ops = torch.ops.birkhoff
    make = lambda length: tuple(heads((1, 2, length, 4), torch.float64, device) for _ in range(3))
    near = lambda a, b: bool((a - b).abs().max() <= 1e-12)
    q, k, v = make(22)
    scores = torch.randn(1, 2, 6, 6, dtype=torch.float64, device=device)
    for form in ("full", "prefix", "cumulative", "none"):
        for combine in ("concat", "add_outputs", "add_logits"):
            call = lambda q, k, v, scores, **options: ops.sinkhorn_attention(
                q, k, v, scores, 4, form, 3, combine=combine, **options)
            padded = call(q, k, v, scores, key_lengths=torch.tensor([13], device=device))
            cut = call(*(x[:, :, :13] for x in (q, k, v)), scores[:, :, :4, :4])
            check(near(padded[:, :, :13], cut), f"padding changes tokens ({form}, {combine})")
            packed = call(q,
                          k,
                          v,
                          scores,
                          segments=(torch.arange(22, device=device) >= 12).long()[None])
            parts = [
                call(*(x[:, :, tokens]
                       for x in (q, k, v)), scores[:, :, blocks, blocks])
                for tokens, blocks in ((slice(12), slice(3)), (slice(12, 22), slice(3, 6)))
            ]
            check(near(packed, torch.cat(parts, 2)),
                  f"documents affect each other ({form}, {combine})")
    later = torch.full((6, 6), math.nan, dtype=torch.float64, device=device).triu()
    check(
        torch.equal(ops.sorted_attention(q, k, v, scores + later.nan_to_num(0), 4),
                    ops.sorted_attention(q, k, v, scores + later, 4)),
        "weights of a block itself or of later blocks are read")
    options = {"key_lengths": torch.tensor([17], device=device), "combine": "add_logits"}
    seeded = lambda p, seed: ops.sinkhorn_attention(
        q, k, v, scores, 4, dropout=p, seed=torch.tensor([seed], device=device), **options)
    check(torch.equal(seeded(0.0, 1), ops.sinkhorn_attention(q, k, v, scores, 4, **options)),
          "dropout of 0 changes bits")
    check(torch.equal(seeded(0.5, 1), seeded(0.5, 1)), "one seed gives two results")
    check(not torch.equal(seeded(0.5, 1), seeded(0.5, 2)), "two seeds give one result")
    # Equal probabilities, and values that reveal each of them.
    zeros, unit = torch.zeros(2, 8, 256, 16, device=device), torch.eye(16, device=device).repeat(
        16, 1).expand(2, 8, 256, 16)
    for dropout in (0.1, 0.5):
        seen = ops.block_local_attention(zeros,
                                         zeros,
                                         unit,
                                         16,
                                         causal=False,
                                         dropout=dropout,
                                         seed=torch.tensor(3, device=device)) * 16
        kept = (seen > 0).double().mean().item()
        check(
            abs(kept - (1 - dropout)) < 5 * math.sqrt(dropout * (1 - dropout) / seen.numel()),
            f"dropout {dropout} keeps {kept}")
        check(bool(((seen - 1 / (1 - dropout)).abs() < 1e-5).logical_or(seen == 0).all()),
              "kept values are not scaled")
    print("padding and documents do not affect other tokens; dropout follows its seed and its rate")


def cases(device):
    """(operator, arguments, keywords) in fp64, small: forms, odd lengths, both layouts, options."""
    leaf = lambda x: x.detach().requires_grad_()
    for length, layout in ((8, "BHLD"), (7, "BLHD")):
        make = lambda: leaf(
            heads((1, 2, length, 3), torch.float64, device) if layout == "BLHD" else torch.randn(
                1, 2, length, 3, dtype=torch.float64, device=device))
        for window_arguments in ((4, 1, 0, True), (4, 1, 1, False)):
            yield "block_local_attention", (make(), make(), make(), *window_arguments), {}
        N = -(-length // 2)
        square = lambda: leaf(torch.rand(1, 2, N, N, dtype=torch.float64, device=device))
        yield "sorted_attention", (make(), make(), make(), square(), 2, True), {}
        for form in ("full", "prefix", "cumulative", "none"):
            yield "sinkhorn_balance", (square(), 3, form), {}
            yield "sinkhorn_attention", (make(), make(), make(), square(), 2, form, 2), {}
        segments = (torch.arange(length, device=device) >= 3).long()[None]
        options = {
            "dropout": 0.5,
            "seed": torch.tensor([11], device=device),
            "key_lengths": torch.tensor([6], device=device),
            "segments": segments
        }
        yield "block_local_attention", (make(), make(), make(), 4, 1, 0, True), options
        yield "dense_attention", (make(), make(), make(), True), {}
        yield "dense_attention", (make(), make(), make(), False), options
        yield "sorted_attention", (make(), make(), make(), square(), 2, True), {
            "combine": "add_outputs",
            **options
        }
        yield "sorted_attention", (make(), make(), make(), square(), 2, False), options
        yield "sinkhorn_attention", (make(), make(), make(), square(), 2, "prefix", 2), {
            "combine": "add_logits",
            **options
        }


def last_of_each(all_cases):
    """The last case of each operator, which has all its options."""
    return tuple({case[0]: case for case in all_cases}.values())


def gradients_and_traces(device, full):
    all_cases = (*cases(device), *gathered_cases(heads, device), *all_pairs_cases(heads, device),
                 *pattern_cases(heads, device))
    count = 0
    for name, arguments, keywords in all_cases if full else last_of_each(all_cases):
        operator = getattr(torch.ops.birkhoff, name).default
        keywords = {
            key:
                x.detach().requires_grad_()
                if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for key, x in keywords.items()
        }
        arguments = list(arguments)
        slots = [
            *(i for i, x in enumerate(arguments)
              if isinstance(x, torch.Tensor) and x.requires_grad),
            *(key for key, x in keywords.items() if isinstance(x, torch.Tensor) and x.requires_grad)
        ]
        at = lambda slot: arguments[slot] if isinstance(slot, int) else keywords[slot]

        def call(*tensors):
            mine = dict(zip(slots, tensors))
            out = operator(*(mine.get(i, x) for i, x in enumerate(arguments)), **{
                key: mine.get(key, x) for key, x in keywords.items()
            })
            return out[:2] if name == "routing_attention" else out

        if name != "select_top_blocks":
            check(torch.autograd.gradcheck(call, list(map(at, slots))),
                  f"gradcheck of {name} with {list(keywords)}")
        torch.library.opcheck(operator, tuple(arguments), keywords)
        count += 1
    # No CPU kernel supports float16.
    half = [torch.randn(1, 2, 10, 4, device=device).half().requires_grad_() for _ in range(3)]
    padding = {"key_lengths": torch.tensor([6], device=device)}
    for name, arguments, keywords in (("dense_attention", (), padding), ("dense_attention", (), {}),
                                      ("top_k_attention", (3,), padding),
                                      ("entmax_attention", (), padding),
                                      ("sinkformer_attention", (), padding)):
        torch.library.opcheck(
            getattr(torch.ops.birkhoff, name).default, (*half, *arguments), keywords)
        count += 1
    print(f"torch.autograd.gradcheck and torch.library.opcheck pass on {count} calls")
    if not full:
        return
    # The private operators that users' operators call.
    ops = torch.ops.birkhoff
    count = 0

    def both(operator, inputs, outputs, saved, options):
        """opcheck of a private operator and its gradient. `outputs` results have gradients, those
        from `saved` on are saved."""
        nonlocal count
        torch.library.opcheck(operator.default, (inputs, *options))
        plain = [x.detach() for x in inputs]
        results = operator(plain, *options)
        torch.library.opcheck(
            getattr(ops, operator._qualified_op_name.split("::")[1] + "_backward").default,
            ([torch.randn_like(x) for x in results[:outputs]], plain, results[saved:], *options))
        count += 2

    for name, arguments, keywords in cases(device):
        plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
        none = [torch.zeros(0, dtype=torch.float64, device=device)
               ] * 3  # relative keys and values, sinks
        if name == "sinkhorn_balance":
            both(ops._sinkhorn_balance, [arguments[0]], 1, 1,
                 arguments[1:])
        elif name in ("block_local_attention", "sorted_attention"):
            number = 3 if name == "block_local_attention" else 4
            options = arguments[number:] if number == 3 else (arguments[4], 0, 0, arguments[5])
            options += (keywords.get("combine", "concat"), keywords.get("dropout", 0.0),
                        *map(keywords.get, ("seed", "key_lengths", "segments")))
            both(ops._attention_in_blocks,
                 [*arguments[:3], *none, *arguments[3:number]], 1, 0, options)
    for name, arguments, keywords in gathered_cases(heads, device):
        plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        inputs = [
            *(none[0] if x is None else x for x in plain[:3]),
            *(keywords.get(key, none[0]) for key in ("relative_keys", "relative_values", "sink"))
        ]
        masks = tuple(map(keywords.get, ("key_lengths", "segments")))
        if name == "routing_attention":
            options = (*plain[3:5], (plain[5:] or ["causal_bucket"])[0],
                       keywords.get("overlap", "mean"), keywords.get("logit_scale", 0.0), *masks)
            both(ops._attention_in_clusters, inputs, 2, 3,
                 options)
        elif name == "listed_block_attention":
            options = (*plain[3:5], True, *masks)
            both(ops._attention_to_listed_blocks, inputs,
                 1, 1, options)
    for operator, inputs, options in (*private_calls(heads, device),
                                      *pattern_calls(heads, device)):
        both(operator, inputs, 1, 1, options)
    name, arguments, keywords = list(cases(device))[-1]
    plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    torch.library.opcheck(ops.open_block_pairs.default, (plain[0], 2),
                          {name: keywords[name] for name in ("key_lengths", "segments")})
    print(f"torch.library.opcheck passes on {count + 1} calls of the private operators")


def compiled_options(device):
    """All options in a compiled graph: the results equal eager PyTorch, and one graph serves all
    seeds, key lengths and documents."""
    attention = lambda q, k, v, scores, **options: torch.ops.birkhoff.sinkhorn_attention(
        q, k, v, scores, 8, dropout=0.25, **options)
    compiled = torch.compile(attention, fullgraph=True)
    for length in (32, 40, 48):
        q, k, v = (heads((2, 2, length, 8), torch.float32, device) for _ in range(3))
        scores = torch.randn(2, 2, length // 8, length // 8, device=device)
        for step in range(3):
            options = {
                "seed":
                    torch.tensor([step], device=device),
                "key_lengths":
                    torch.tensor([length, 9 + step], device=device),
                "segments":
                    (torch.arange(length, device=device) // (10 + step)).expand(2, -1).contiguous()
            }
            # The second length makes PyTorch compile one graph for any length.
            with torch.compiler.set_stance(
                    "fail_on_recompile" if length == 48 or step > 0 else "default"):
                same(f"compiled attention of {length} tokens", lambda *x: compiled(*x, **options),
                     lambda *x: attention(*x, **options), (q, k, v, scores), 1e-6)
    # A seed from PyTorch's own generator.
    drawn = torch.compile(lambda x: torch.ops.birkhoff.block_local_attention(
        x, x, x, 8, dropout=0.5, seed=torch.randint(2**62, (1,), device=x.device)),
                          fullgraph=True)
    check(not torch.equal(drawn(q), drawn(q)), "a compiled graph always draws the same seed")
    print("compiled graphs accept padding, documents and new seeds without recompiling")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--torch",
                        default="2.11.0",
                        help="the version that the library was built with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--full",
                        action="store_true",
                        help="all cases of gradcheck and opcheck, and torch.compile")
    arguments = parser.parse_args()
    if torch.__version__.split("+")[0] != arguments.torch:
        print(f"SKIPPED: PyTorch {torch.__version__} is not {arguments.torch}")
        return 77
    torch.manual_seed(1)
    types = documented_modules(arguments.library.resolve())
    definitions(arguments.device)
    meaning(arguments.device)
    gathered_definitions(same, heads, arguments.device)
    gathered_meaning(heads, arguments.device)
    all_pairs_definitions(same, heads, arguments.device)
    all_pairs_meaning(heads, arguments.device)
    pattern_definitions(same, heads, arguments.device)
    pattern_meaning(heads, arguments.device)
    if arguments.device == "cpu":
        refusals()
        extremes()
    gradients_and_traces(arguments.device, arguments.full)
    if arguments.full:
        compiled_options(arguments.device)
        all_pairs_compiled(same, heads, arguments.device)
    for make in (lambda: types["SinkhornAttention"](32, 4, 8, 8), lambda: types["RoutingAttention"]
                 (32, 4, 4, 16), lambda: types["MixtureOfBlockAttention"](32, 4, 8, 2),
                 lambda: types["TopKAttention"](32, 4, 8), lambda: types["EntmaxAttention"]
                 (32, 4), lambda: types["SinkformerAttention"](32, 4, 5),
                 lambda: types["SparseTransformerAttention"](32, 4, 8),
                 lambda: types["SortCutAttention"](32, 4, 8, 8, 2)):
        training(make, arguments.device, arguments.full)
    return 0


if __name__ == "__main__":
    sys.exit(main())
