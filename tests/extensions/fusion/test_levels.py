"""Both levels, torch's private functions and documented ones only, have the same results."""

from __future__ import annotations

import pytest
import torch

from freetrain_parsl.extensions.fusion.forward import vmap_level
from freetrain_parsl.extensions.fusion.forward.vmap_level import new_level
from tests.extensions.fusion.cases import CASES
from tests.extensions.fusion.operator_table import outcome


@pytest.fixture
def without_private_functions(monkeypatch):
    monkeypatch.setattr(vmap_level, "_private", None)
    assert type(new_level(2)) is vmap_level._PublicLevel


# One case for each kind of rule; all others are slow tests.
QUICK = {
    "Linear",
    "Embedding(padding_idx)",
    "Conv2d",
    "BatchNorm2d",
    "LSTM(num_layers=2, dropout)",
    "MultiheadAttention(dropout)",
    "TransformerEncoderLayer(dropout)",
    "Dropout",
    "rand",
    "RReLU",
    "empty().normal_()",
    ".item()",
    "buffer assigned anew",
    "out[:, t] = …",
}

# Without private functions, only verification notices that gradients do not pass through such a transform.
UNNOTICED = {"func.grad"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.slow)
        for case in CASES
        if case.name not in UNNOTICED
    ],
)
def test_results_without_private_functions_are_those_of_each_training_alone(case, without_private_functions):
    kind, reason = outcome(case, shared=False, agree=False)
    assert kind in {"fused", "row by row", "refused"}, reason
    if case.name in QUICK - {".item()"}:
        assert kind != "refused", reason


@pytest.fixture(params=["private", "public"])
def level(request, monkeypatch):
    if request.param == "public":
        monkeypatch.setattr(vmap_level, "_private", None)
    return new_level(3)


def test_rows_are_those_of_the_stack(level):
    stack = torch.randn(3, 4, requires_grad=True)

    def check():
        wrapped = level.wrap(stack)
        assert wrapped.shape == (4,)
        assert level.is_stacked(wrapped)
        assert not level.is_stacked(torch.zeros(3))
        assert not level.is_stacked("text")
        rows = level.rows(wrapped * 2)
        assert level.unwrap(level.wrap(stack, 1))[1] == 1
        assert level.rows(level.wrap(torch.zeros(4, 3), 1)).shape == (3, 4)
        return rows, level.rows(torch.ones(2))

    rows, expanded = level.run(check)
    assert torch.equal(rows, stack * 2)
    assert torch.equal(expanded, torch.ones(3, 2))
    rows.sum().backward()
    assert torch.equal(stack.grad, torch.full((3, 4), 2.0))


def test_random_numbers_are_drawn_on_request_only(level):
    def draw():
        with pytest.raises(RuntimeError, match="random"):
            torch.rand(2)
        return level.draw(lambda: torch.rand(2))

    torch.manual_seed(3)
    found = level.run(draw)
    torch.manual_seed(3)
    assert torch.equal(found, torch.rand(2))


def test_an_error_closes_the_level(level):
    def fail():
        with level.suspended(), level.suspended():
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # has no message
        level.run(fail)
    assert torch.rand(2).shape == (2,)
    assert level.run(lambda: 1) == 1
