"""A fused call: arguments and results of any form, the state of the model, errors."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.engine.per_member import PerMember
from freetrain_parsl.extensions.fusion.forward.forward import Stacked, fused_call
from tests.extensions.fusion.members import Streams, compared, made, stacks


def call(models, *args, seeds=(1, 2, 3), **kwargs):
    parameters, buffers = stacks(models)
    return fused_call(models[0], models[0], parameters, buffers, args, kwargs, Streams(seeds))


def linears(count=3):
    return made(lambda: nn.Linear(4, 4), range(count))


class Structured(nn.Linear):
    def forward(self, x, *, scales, flag, factor=1):
        y = super().forward(x["x"]) * factor
        return {"y": y, "list": [y * scale for scale in scales], "pair": (y.shape[0], None, flag), "constant": x["x"]}


def test_arguments_and_results_are_containers_of_anything():
    models = made(lambda: Structured(4, 4), range(3))
    x, scales = torch.randn(5, 4), torch.randn(3)
    result = call(models, {"x": x}, scales=[Stacked(scales), 2.0], flag=True, factor=3)
    for member, model in enumerate(models):
        expected = model({"x": x}, scales=[scales[member], 2.0], flag=True, factor=3)
        torch.testing.assert_close(result["y"][member], expected["y"])
        torch.testing.assert_close(result["list"][0][member], expected["list"][0])
        torch.testing.assert_close(result["list"][1][member], expected["list"][1])
    assert result["pair"] == (5, None, True)
    assert torch.equal(result["constant"], x.expand(3, 5, 4))


def test_one_member_is_an_array_too():
    models = linears(1)
    x = torch.randn(5, 4)
    torch.testing.assert_close(call(models, x, seeds=[1])[0], models[0](x))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_lstm_in_single_precision_is_that_of_each_training_alone(dropout):
    models = made(lambda: nn.LSTM(4, 5, num_layers=2, dropout=dropout, batch_first=True), range(3))
    comparison = compared(models, [(torch.randn(6, 7, 4),) for _ in models], shared=False, seeds=[1, 2, 3])
    assert comparison.difference < 1e-5
    assert comparison.serial == {"lstm"}


@pytest.mark.parametrize(
    ("make", "attribute", "inputs"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), "1.p", (6, 8)),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout2d(0.1)), "1.p", (6, 4, 5, 5)),
        (lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.1), "dropout", (6, 5, 8)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16), "self_attn.dropout", (6, 5, 8)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16), "dropout1.p", (6, 5, 8)),
    ],
)
@pytest.mark.parametrize("seeds", [[4, 4, 4], [4, 5, 6]])
@pytest.mark.parametrize("values", [(0.1, 0.4, 0.8), (0.0, 0.5, 1.0)])
def test_each_member_has_its_own_dropout_probability(make, attribute, inputs, seeds, values):
    models = made(lambda: make().double(), range(3))
    owner, _, name = attribute.rpartition(".")
    for model, value in zip(models, values, strict=True):
        setattr(model.get_submodule(owner), name, value)
    x = [(torch.randn(inputs, dtype=torch.float64),) for _ in models]
    if attribute == "self_attn.dropout" and 0.0 in values:  # decides whether there is dropout at all
        models[0].self_attn.dropout = 0.2
    assert compared(models, x, shared=False, seeds=seeds).difference < 1e-10


def test_training_is_that_of_the_moment():
    models = made(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval(), range(3))
    x = torch.randn(5, 4)
    torch.testing.assert_close(call(models, x), torch.stack([model(x) for model in models]))


def test_gradients_are_those_of_the_moment():
    models, x = linears(), torch.randn(5, 4)
    assert call(models, x).requires_grad
    with torch.no_grad():
        assert not call(models, x).requires_grad
    with torch.inference_mode():
        assert call(models, Stacked(torch.randn(3, 5, 4))).is_inference()


def test_autocast_is_that_of_the_moment():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(linears(), torch.randn(5, 4)).dtype == torch.bfloat16


def test_everything_is_restored_after_a_call_and_after_an_error():
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)
            self.drop = nn.Dropout(0.3)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x, *, fail):
            self.scale = self.scale * 2
            if fail:
                raise KeyError(fail)
            return self.drop(self.lstm(x)[0])

    models = made(Failing, range(3))
    template = models[0]
    before = [*template.parameters(), *template.buffers(), *template.lstm._flat_weights]
    parameters, buffers = stacks(models)
    arguments = (parameters, buffers, (torch.randn(5, 4),))
    differing = {"drop.p": PerMember([0.1, 0.2, 0.3])}
    fused_call(template, template, *arguments, {"fail": None}, Streams([1, 2, 3]), differing=differing)
    assert torch.equal(buffers["scale"], torch.full((3,), 2.0))
    with pytest.raises(KeyError, match="why"):
        fused_call(template, template, *arguments, {"fail": "why"}, Streams([1, 2, 3]), differing=differing)
    after = [*template.parameters(), *template.buffers(), *template.lstm._flat_weights]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert template.drop.p == 0.3
    assert template(torch.randn(5, 4), fail=None).shape == (5, 4)


def test_the_models_own_errors_are_raised():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        call(linears(), torch.randn(5, 3))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        call(made(lambda: nn.LayerNorm(4), range(3)), torch.randn(5, 3))


def test_a_module_that_was_exchanged_after_the_first_call_is_used():
    models = made(lambda: nn.Sequential(nn.Linear(4, 4)), range(3))
    x = torch.randn(5, 4)
    call(models, x)
    for model in models:
        model[0] = nn.Linear(4, 2)
    torch.testing.assert_close(call(models, x), torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("change", ["assign", "add", "append", "buffer"])
def test_a_model_that_keeps_a_state_is_refused_by_name(change):
    class Keeping(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.calls = 0
            self.kept = []

        def forward(self, x):
            y = super().forward(x)
            if change == "assign":
                self.calls += 1
            elif change == "add":
                self.last = y
            elif change == "append":
                self.kept.append(y)
            else:
                self.register_buffer("new", y)
            return y

    models = made(lambda: nn.Sequential(Keeping()), range(3))
    with pytest.raises(CannotFuse, match=r"changes its attribute 0\.(calls|last|kept|_buffers)"):
        call(models, torch.randn(5, 4))
    assert models[0][0].calls == 0
    assert not hasattr(models[0][0], "last")


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_models_that_draw_from_the_generators_of_python_or_numpy_are_refused(draw):
    class Drawing(nn.Linear):
        def forward(self, x):
            return super().forward(x) * draw()

    models = made(lambda: Drawing(4, 4), range(3))
    for seeds in ([1, 2, 3], [1, 1, 1]):
        with pytest.raises(CannotFuse, match="Python or numpy"):
            call(models, torch.randn(5, 4), seeds=seeds)


def test_a_buffer_of_another_shape_is_refused():
    class Growing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = torch.cat([self.seen, torch.zeros(1)])
            return super().forward(x)

    with pytest.raises(CannotFuse, match="another shape or type to seen"):
        call(made(Growing, range(3)), torch.randn(5, 4))


def test_a_stacked_input_that_is_changed_is_refused():
    models = made(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), range(3))
    with pytest.raises(CannotFuse, match="changes its input in place"):
        call(models, Stacked(torch.randn(3, 5, 4)))


def test_a_function_of_its_own_can_be_called():
    models, x = linears(), torch.randn(5, 4)
    parameters, buffers = stacks(models)
    function = lambda value: models[0](value).relu().sum()  # noqa: E731
    result = fused_call(models[0], function, parameters, buffers, (x,), {}, Streams([1, 2, 3]))
    torch.testing.assert_close(result, torch.stack([model(x).relu().sum() for model in models]))


def test_stacks_may_be_parts_of_flat_rows():
    """Parameters as views of one row per member, as arrays store them; BatchNorm's statistics, too."""
    models = made(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), range(3))
    alone = copy.deepcopy(models)
    parameters, buffers = stacks(models)
    padded = {name: torch.cat([stack, stack], -1) for name, stack in buffers.items() if stack.dim() > 1}
    buffers |= {name: wide[..., : wide.shape[-1] // 2] for name, wide in padded.items()}
    x = torch.randn(5, 4)
    for _ in range(2):
        result = fused_call(models[0], models[0], parameters, buffers, (x,), {}, Streams([1, 2, 3]))
        expected = torch.stack([model(x) for model in alone])
    torch.testing.assert_close(result, expected)
    for name, stack in buffers.items():
        torch.testing.assert_close(stack, torch.stack([dict(model.named_buffers())[name] for model in alone]))


def test_modes_of_the_model_itself_work():
    class WithDevice(nn.Linear):
        def forward(self, x):
            with torch.device("cpu"):
                return F.dropout(super().forward(x) + torch.zeros(4), 0.5)

    models = made(lambda: WithDevice(4, 4).double(), range(3))
    x = [(torch.randn(5, 4, dtype=torch.float64),)] * 3
    assert compared(models, x, shared=True, seeds=[1, 2, 3]).difference < 1e-10


def test_a_number_of_each_member_is_never_one_number():
    number = PerMember([0.1, 0.3])
    assert math.isnan(float.__add__(number, 0.0))
    assert number > 0
    assert number != 0.2
    assert bool(number)
    assert (1 - number).values == (0.9, 0.7)
    assert (number * 2 + number).values == pytest.approx((0.3, 0.9))
    assert (1 / (number / 2)).values == pytest.approx((20, 1 / 0.15))
    assert (-(number**2)).values == pytest.approx((-0.01, -0.09))
    assert f"{number!r}" == "0.1, 0.3"
    with pytest.raises(CannotFuse, match=r"comparison with 0\.1, 0\.3"):
        _ = number < 0.2
    for convert in (float, int, round, lambda value: value % 2):
        with pytest.raises(CannotFuse, match=r"one number is needed where the training jobs have 0\.1, 0\.3"):
            convert(number)
