"""LoRA by PEFT on a Llama of `transformers`: one base for all members, and the adapters that each has alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from freetrain_parsl.training.checkpoints.copy_on_write import address_of
from tests.extensions.fusion.sweep_trainings import alone, distance, together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow  # importing both takes seconds

BASES: dict[int, set[int]] = {}


@pytest.fixture(autouse=True)
def _no_bases() -> Iterator[None]:
    BASES.clear()
    yield
    BASES.clear()


def tune(session: Any, *, me: int, lr: float, pretrained: str, merge: bool = False) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(pretrained, use_cache=False)
    options = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(base, options, autocast_adapter_dtype=False).double()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=lr)
    model, optimizer = session.prepare(model, optimizer)
    words = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(1))
    data = session.loader(torch.utils.data.TensorDataset(words), 4)
    for _ in session.epochs(2):
        for (batch,) in data:
            if me == 0 and merge and session.metrics["steps"] == 3:
                model.merge_adapter()
                model.unmerge_adapter()
            logits = model(input_ids=batch).logits
            session.step(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()))
            # Read before the others have this many steps: afterwards it may be gone.
            BASES.setdefault(session.metrics["steps"], set()).add(address_of(model.get_input_embeddings().weight))
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture
def pretrained(tmp_path: Path) -> str:
    pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.parametrize("merge", [False, True], ids=["", "one merges its adapter"])
def test_members_that_load_one_base_share_it(tmp_path: Path, pretrained: str, merge: bool) -> None:
    points = [{"me": me, "lr": 0.01 * (me + 1), "pretrained": pretrained, "merge": merge} for me in range(3)]
    outcome = together(tmp_path / "array", points, tune, seeds=range(3))
    assert outcome.engine.fused_steps == 8, outcome.engine.reason
    assert [len(places) for places in BASES.values()] == [1] * 8
    for me, point in enumerate(points):
        value = alone(tmp_path / "alone", str(me), point, tune, seed=me)
        assert distance(outcome.value(str(me)), value) < 1e-10
