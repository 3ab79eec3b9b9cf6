"""torch's compiler is imported by what uses it, and then is what it would have been."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = Path(__file__).parent / "deferring.py"

USES = (
    "import torch._dynamo.eval_frame",
    "import torch._dynamo.config as config; assert config.cache_size_limit > 0",
    "from torch._dynamo.eval_frame import OptimizedModule",
    "from torch._dynamo import OptimizedModule",
    "from torch._dynamo import external_utils",
    "from torch._dynamo import *; disallow_in_graph",
    "torch._dynamo.reset()",
    "torch.compiler.reset()",
    "torch.compiler.disable(step)()",
    "torch.compiler.disable()(step)()",
    "torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST",
    "stand_in = torch._dynamo; stand_in.reset(); stand_in.graph_break(); stand_in.OptimizedModule",
    "import cloudpickle; stand_in = torch._dynamo; cloudpickle.loads(cloudpickle.dumps(lambda: stand_in.reset()))()",
    "import dill; stand_in = torch._dynamo; dill.loads(dill.dumps(lambda: stand_in.reset(), recurse=True))()",
    "torch._dynamo.mine = 1; torch._dynamo.reset(); assert torch._dynamo.mine",
    "assert 'OptimizedModule' in dir(torch._dynamo)",
    "rules = torch._dynamo.trace_rules; torch._dynamo.reset(); rules.clear_lru_cache()",
    "torch._disable_dynamo(WithoutHash())(); torch._dynamo.reset()",
    "break_with('from torch._dynamo import graph_break')",
    "interrupted()",
    "from torch.utils.checkpoint import checkpoint; checkpoint(net, batch, use_reentrant=False).sum().backward()",
    "together()",
    "compiled()",
)


def _run(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, str(_SCRIPT), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_plain_training_loop_does_not_import_it():
    assert _run("train_as_usual()") == [{"loaded": False, "loaders": []}]


@pytest.mark.slow
def test_what_uses_it_finds_the_real_one():
    for use, found in zip(USES, _run(*USES), strict=True):
        assert found["loaded"], use
        assert found["loaders"] == ["SourceFileLoader"], use
        assert found["disabled"], use
        assert found.get("failed", []) == [], use


@pytest.mark.slow
def test_a_submodule_that_is_only_looked_for_stays_imported():
    (found,) = _run("look_for_submodule()")
    assert found["same"]


@pytest.mark.slow
def test_compiled_steps_are_the_same():
    (deferred,), (plain,) = _run("compiled()"), _run("--plain", "compiled()")
    assert deferred == plain
    assert deferred["graphs"]
