"""The modules of docs/pytorch.md, and a training loop for them."""

import os
import pathlib
import re

import torch

from operator_definitions import check

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs/pytorch.md"


def documented_modules(library):
    """The types that the document defines, after checking that each takes few lines."""
    os.chdir(library.parent)
    types = {}
    for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S):
        names = {}
        exec(compile(code, str(DOCUMENT), "exec"), names)
        lines = len([line for line in code.splitlines() if line.strip()])
        check(lines <= 30, f"a documented module has {lines} lines")
        types |= {name: x for name, x in names.items() if isinstance(x, type)}
    return types


def training(make, device, full):
    """The module that make() returns learns, with two sequence lengths; with `full`, its losses are
    the same compiled (inductor)."""
    losses = {}
    for way in ("eager", "compiled") if full else ("eager",):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Embedding(17, 32), make(),
                                    torch.nn.Linear(32, 17)).to(device)
        if way == "compiled":
            # Compilations of other modules would count towards the limit of this one.
            torch.compiler.reset()
            # A graph break would be an error: the operators must be part of the graph.
            run = torch.compile(model, fullgraph=True)
        else:
            run = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[way] = []
        for step in range(60):
            length = 64 if step % 4 else 40
            tokens = (torch.arange(length + 1)[None] * torch.tensor([[1], [3], [5], [7]]) +
                      step) % 17
            tokens = tokens.to(device)
            loss = torch.nn.functional.cross_entropy(
                run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if hasattr(model[1], "update"):
                model[1].update()
            losses[way].append(loss.item())
    worst = max(abs(a - b) / a for a, b in zip(losses["eager"], list(losses.values())[-1]))
    check(worst < 1e-3, f"compiled losses differ from eager ones by {worst:.1e}")
    check(losses["eager"][-1] < 0.5 * losses["eager"][0],
          f"the loss does not fall: {losses['eager'][0]:.3f} to {losses['eager'][-1]:.3f}")
    compiled = f"; torch.compile's losses differ by at most {worst:.1e}" if full else ""
    print(
        f"{type(make()).__name__}: 60 steps of training, loss {losses['eager'][0]:.3f} to "
        f"{losses['eager'][-1]:.3f}{compiled}"
    )
