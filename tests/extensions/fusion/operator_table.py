"""The table of fused operators in the documentation: ``python -m tests.extensions.fusion.operator_table`` writes it."""

from __future__ import annotations

import functools
from itertools import groupby
from pathlib import Path

import torch

from freetrain_parsl.errors import CannotFuse
from tests.extensions.fusion.cases import CASES, Case
from tests.extensions.fusion.members import compared, made

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "fusion-operators.md"
MEMBERS = 3

_INTRODUCTION = """\
# Operators in fused training jobs

Training jobs whose models have equal structure can compute as one *array*
([how](../howto/sweep.md#fused-training-jobs)). This page lists how layers and operators behave in its forward and
backward pass. The tests compute every line with float64 for three training jobs, on the same and on different
samples, with the same and with different random numbers, and compare outputs, gradients and buffers with those of
each training job alone; `python -m tests.extensions.fusion.operator_table` writes this page from the results.

- **fused**: one computation for all training jobs, with the results that each has alone.
- **row by row**: the named operators run once per training job, with the results and at the speed that each has alone.
  So does, in float32 on the CPU, a fused LSTM, because torch's kernel for one training job is faster.
- **refused**: the training jobs run one by one, with the reason in the log. Nothing is computed differently without
  notice.
"""


def outcome(case: Case, *, shared: bool, agree: bool, device: str = "cpu") -> tuple[str, str]:
    """Compute a case fused and alone; return ``fused``, ``row by row``, ``refused`` or ``different``, and details."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device(device)
    try:
        models = made(case.make, range(MEMBERS))
        with torch.random.fork_rng():
            torch.manual_seed(MEMBERS)
            inputs = [(case.inputs(),) for _ in range(MEMBERS)]
        comparison = compared(models, inputs, shared=shared, seeds=[5] * MEMBERS if agree else [5, 6, 7], steps=2)
    except CannotFuse as error:
        return "refused", str(error)
    finally:
        torch.set_default_dtype(default)
        torch.set_default_device(None)
    if comparison.difference > case.tolerance:
        return "different", f"{comparison.difference:.1e}"
    if comparison.serial:
        return "row by row", ", ".join(f"`{name}`" for name in sorted(comparison.serial))
    return "fused", ""


def line(case: Case) -> str:
    """Return a line of the table: the outcome that holds for all inputs and random numbers."""
    found = [outcome(case, shared=shared, agree=agree) for agree in (True, False) for shared in (True, False)]
    parts = []
    for kind in ("fused", "row by row", "refused", "different"):
        details = [detail for name, detail in found if name == kind]
        if details:
            where = "" if len(details) == len(found) or kind == "fused" else _where(found, kind)
            detail = max(details, key=len).replace("|", "\\|")
            parts.append(f"{kind}{where}" + (f": {detail}" if detail else ""))
    return f"| {case.name} | {'; '.join(parts)} |"


def _where(found: list[tuple[str, str]], kind: str) -> str:
    """Return in which of the four combinations an outcome occurs."""
    occurs = [name == kind for name, _ in found]
    if occurs == [False, False, True, True]:
        return " with different random numbers"
    if occurs == [False, True, False, True]:
        return " with different samples"
    if occurs == [True, False, True, False]:
        return " with the same samples"
    return " in some cases"


@functools.cache
def page() -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION]
    for group, cases in groupby(CASES, key=lambda case: case.group):
        parts.append(f"\n## {group}\n\n| layer or operator | in an array |\n|---|---|\n")
        parts += [line(case) + "\n" for case in cases]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
