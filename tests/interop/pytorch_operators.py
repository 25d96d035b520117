"""Tries libbirkhoff_ops.so as a user of PyTorch would: each operator against the same in eager PyTorch, torch.autograd.gradcheck,
torch.library.opcheck, and the module of docs/pytorch.md in a training loop, eager and compiled.

    python pytorch_operators.py --library build/cpu/libbirkhoff_ops.so [--device cuda]

Ends with 0 if all holds, with 77 (ctest: skipped) where Python has no PyTorch or one of another version than --torch."""

import argparse
import itertools
import math
import os
import pathlib
import re
import sys

# Compiled graphs are cached by PyTorch's version and the program, not by the signatures of our operators.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

try:
    import torch
    import functorch.compile  # noqa: F401 - what opcheck needs, and with it the wheel's own requirements
except Exception as error:  # no PyTorch, or one without its libraries or the packages that it requires
    print(f"SKIPPED: import torch: {error}")
    sys.exit(77)

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs/pytorch.md"
BARRED = -math.inf


def check(good, what):
    if not good:
        sys.exit(f"FAILED: {what}")


# ---- The operators in eager PyTorch, from their definitions.


def window(length, block, look_back, look_ahead, causal):
    """bool [L, L]: which keys queries see."""
    token = torch.arange(length)
    distance = token[:, None] // block - token[None, :] // block
    seen = (distance <= look_back) & (distance >= -look_ahead)
    return seen & (token[None, :] <= token[:, None]) if causal else seen


def masked_attention(q, k, v, seen):
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~seen.to(q.device), BARRED)
    return scores.softmax(-1) @ v


def sinkhorn(scores, iterations):
    """Columns, then rows, divided by their sums, in the log domain."""
    for _ in range(iterations):
        for dim in (-2, -1):
            total = scores.logsumexp(dim, keepdim=True)
            scores = scores - total.masked_fill(total == BARRED, 0)
    return scores.exp()


def balance(scores, iterations, form):
    if form == "full":
        return sinkhorn(scores, iterations)
    N = scores.shape[-1]
    rows = [torch.zeros_like(scores[..., 0, :])]
    for u in range(1, N):
        if form == "none":
            past = torch.cat([scores[..., u, :u], torch.zeros_like(scores[..., u, :1])], -1).softmax(-1)[..., :u]
        else:  # prefix: destinations 1..u and sources 0..u-1 are a matrix of their own
            past = sinkhorn(scores[..., 1 : u + 1, :u], iterations)[..., -1, :]
        rows.append(torch.nn.functional.pad(past, (0, N - u)))
    return torch.stack(rows, -2)


def sorted_attention(q, k, v, weights, block, causal):
    if causal:
        weights = weights.tril(-1)
    B, H, L, D = q.shape
    pad = -L % block
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, block)) for x in (q, k, v))
    keys, values = (torch.cat([torch.einsum("bhuv,bhvtd->bhutd", weights, x), x], 3) for x in (k, v))
    N = q.shape[2]
    seen = torch.ones(N, block, 2 * block, dtype=torch.bool)
    if causal:
        seen[0, :, :block] = False
        seen[:, :, block:] = torch.ones(block, block, dtype=torch.bool).tril()
    return masked_attention(q, keys, values, seen).flatten(2, 3)[:, :, :L]


# ---- Checks.


def same(name, ours, theirs, inputs, tolerance):
    """Results and gradients of ours(*inputs) and theirs(*inputs)."""
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape))
        results.append([out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)])
    for i, (mine, other) in enumerate(zip(*results)):
        error = (mine - other).abs().max() / other.abs().max().clamp_min(1e-30)
        check(error <= tolerance, f"{name}: {'result' if i == 0 else f'gradient {i - 1}'} differs by {error:.1e} (bound {tolerance:.1e})")


def heads(shape, dtype, device):
    """As a layer makes them: a view of [B, L, H, D]."""
    B, H, L, D = shape
    return torch.randn(B, L, H, D, dtype=torch.float64).transpose(1, 2).to(device, dtype)


def definitions(device):
    """Each operator against its definition. fp64 shows the maths, fp32 and bf16 that their paths are those of the same."""
    ops, count = torch.ops.birkhoff, 0
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 3e-5), (torch.bfloat16, 0.05)):
        for length, block in ((32, 8), (19, 8), (5, 8)):
            q, k, v = (heads((2, 3, length, 5), dtype, device) for _ in range(3))
            for look_back, look_ahead, causal in ((0, 0, True), (1, 0, True), (2, 0, True), (0, 0, False), (1, 1, False), (0, 2, False)):
                arguments = (block, look_back, look_ahead, causal)
                same(f"block_local_attention{arguments} of {length} tokens in {dtype}",
                     lambda *x: ops.block_local_attention(*x, *arguments),
                     lambda *x: masked_attention(*x, window(length, *arguments)), (q, k, v), tolerance)
                count += 1
            N = -(-length // block)
            scores = 2 * torch.randn(2, 3, N, N, dtype=torch.float64).to(device, dtype if dtype == torch.float64 else torch.float32)
            for form in ("full", "prefix", "none"):
                if form == "full" and length % block:
                    continue
                same(f"sinkhorn_attention {form} of {length} tokens in {dtype}",
                     lambda *x: ops.sinkhorn_attention(*x, block, form, 3),
                     lambda *x: sorted_attention(*x[:3], balance(x[3], 3, form).to(dtype), block, form != "full"), (q, k, v, scores), tolerance)
                count += 1
            # Weights of the own and of later blocks do not matter.
            same(f"sorted_attention of any weights and {length} tokens in {dtype}", lambda *x: ops.sorted_attention(*x, block, True),
                 lambda *x: sorted_attention(*x, block, True), (q, k, v, scores.to(dtype)), tolerance)
            count += 1
    # The form `cumulative` has no short definition: its rows are checked for what makes it causal and a share.
    scores = torch.randn(1, 2, 6, 6, dtype=torch.float64, device=device)
    weights = ops.sinkhorn_balance(scores, 4, "cumulative")
    later = scores.clone()
    later[:, :, 4:] += 1
    check(torch.equal(weights[:, :, :4], ops.sinkhorn_balance(later, 4, "cumulative")[:, :, :4]), "cumulative reads later rows")
    check(bool((weights.sum(-1) < 1).all()) and bool((weights.triu() == 0).all()), "cumulative: rows are no shares of earlier blocks")
    q, k, v = (torch.randn(2, 2, 9, 4, dtype=torch.float64, device=device) for _ in range(3))
    same("dense_attention", lambda *x: ops.dense_attention(*x), lambda *x: masked_attention(*x, window(9, 9, 0, 0, True)), (q, k, v), 1e-11)
    print(f"{count + 2} results with their gradients agree with the definitions in eager PyTorch")


def refusals():
    ops = torch.ops.birkhoff
    q, scores = torch.randn(1, 2, 10, 4), torch.randn(1, 2, 2, 2)
    for what, call in {
        "q must be": lambda: ops.block_local_attention(q[0], q[0], q[0], 4),
        "k and v must be like q": lambda: ops.block_local_attention(q, q[:, :, 1:], q, 4),
        "one dtype": lambda: ops.block_local_attention(q, q.double(), q, 4),
        "block must be": lambda: ops.block_local_attention(q, q, q, 0),
        "look_ahead": lambda: ops.block_local_attention(q, q, q, 4, 0, 1, True),
        "whole number of blocks": lambda: ops.sinkhorn_attention(q, q, q, scores, 5 + 1, "full"),
        r"must be \[1, 2, 3, 3\]": lambda: ops.sinkhorn_attention(q, q, q, scores, 4),
        "full, prefix": lambda: ops.sinkhorn_balance(scores, 5, "sideways"),
        "iterations": lambda: ops.sinkhorn_balance(scores, 0),
        "float32 or float64": lambda: ops.sinkhorn_balance(scores.bfloat16()),
    }.items():
        try:
            call()
        except ValueError as error:
            check(re.search(what, str(error)), f"'{error}' does not speak of '{what}'")
        else:
            check(False, f"no ValueError of '{what}'")
    leaf = q.double().requires_grad_()
    (gradient,) = torch.autograd.grad(ops.block_local_attention(leaf, leaf, leaf, 5).sum(), leaf, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        check("not implemented" in str(error), f"second gradient: {error}")
    else:
        check(False, "a gradient of a gradient is given, although there is none")
    print("wrong arguments and second gradients are refused in words")


def cases(device, requires_grad=True):
    """(operator, arguments) in fp64, small: forms, odd lengths, both layouts."""
    ops = torch.ops.birkhoff
    leaf = lambda x: x.detach().requires_grad_(requires_grad)
    for length, layout in ((8, "BHLD"), (7, "BLHD")):
        make = lambda: leaf(heads((1, 2, length, 3), torch.float64, device) if layout == "BLHD" else
                            torch.randn(1, 2, length, 3, dtype=torch.float64, device=device))
        for window_arguments in ((4, 1, 0, True), (4, 1, 1, False)):
            yield "block_local_attention", (make(), make(), make(), *window_arguments)
        N = -(-length // 2)
        square = lambda: leaf(torch.rand(1, 2, N, N, dtype=torch.float64, device=device))
        yield "sorted_attention", (make(), make(), make(), square(), 2, True)
        for form in ("full", "prefix", "cumulative", "none"):
            yield "sinkhorn_balance", (square(), 3, form)
            if form != "full" or length % 2 == 0:
                yield "sinkhorn_attention", (make(), make(), make(), square(), 2, form, 2)
        yield "dense_attention", (make(), make(), make(), True)


def gradients_and_traces(device):
    count = 0
    for name, arguments in cases(device):
        operator = getattr(torch.ops.birkhoff, name).default
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        rest = arguments[len(tensors):]
        check(torch.autograd.gradcheck(lambda *x: operator(*x, *rest), tensors), f"gradcheck of {name}{rest}")
        torch.library.opcheck(operator, arguments)
        count += 1
    print(f"torch.autograd.gradcheck and torch.library.opcheck pass on {count} calls")
    # What users' operators are made of.
    ops = torch.ops.birkhoff
    count = 0
    for name, arguments in cases(device):
        if name in ("sinkhorn_attention", "dense_attention"):
            continue
        forward, backward = getattr(ops, f"_{name}").default, getattr(ops, f"_{name}_backward").default
        torch.library.opcheck(forward, arguments)
        plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
        tensors = tuple(x for x in plain if isinstance(x, torch.Tensor))
        out, saved = forward(*plain)
        results = (saved,) if name == "sinkhorn_balance" else (out, saved)
        torch.library.opcheck(backward, (torch.randn_like(out), *tensors, *results, *plain[len(tensors):]))
        count += 2
    print(f"torch.library.opcheck passes on {count} calls of the operators beneath")


def documented_module(library):
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S).group(1)
    os.chdir(library.parent)
    names = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names["SinkhornAttention"], len([line for line in code.splitlines() if line.strip()])


def training(module_type, device):
    """The same losses from the module eager and compiled (inductor), with a second length on the way."""
    losses = {}
    for way in ("eager", "compiled"):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Embedding(17, 32), module_type(32, 4, 8, 8), torch.nn.Linear(32, 17)).to(device)
        if way == "compiled":
            # A graph break would be an error: the operators must be part of the graph.
            run = torch.compile(model, fullgraph=True)
        else:
            run = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[way] = []
        for step in range(40):
            length = 64 if step % 4 else 40
            tokens = (torch.arange(length + 1)[None] * torch.tensor([[1], [3], [5], [7]]) + step) % 17
            tokens = tokens.to(device)
            loss = torch.nn.functional.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[way].append(loss.item())
    worst = max(abs(a - b) / a for a, b in zip(*losses.values()))
    check(worst < 1e-3, f"compiled losses differ from eager ones by {worst:.1e}")
    check(losses["eager"][-1] < 0.5 * losses["eager"][0], f"the loss does not fall: {losses['eager'][0]:.3f} to {losses['eager'][-1]:.3f}")
    print(f"40 steps of training, loss {losses['eager'][0]:.3f} to {losses['eager'][-1]:.3f}; torch.compile's losses differ by at most {worst:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--torch", default="2.11.0", help="the version that the library was built with")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if torch.__version__.split("+")[0] != arguments.torch:
        print(f"SKIPPED: PyTorch {torch.__version__} is not {arguments.torch}")
        return 77
    torch.manual_seed(1)
    module_type, lines = documented_module(arguments.library.resolve())
    check(lines <= 22, f"the documented module has {lines} lines")
    definitions(arguments.device)
    if arguments.device == "cpu":
        refusals()
    gradients_and_traces(arguments.device)
    training(module_type, arguments.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
