"""Models are compared before they are fused: numbers of dropout may differ, everything else is refused by name."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.forward.differences import compare, traits


class Block(nn.Module):
    def __init__(self, **attributes) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(attributes.pop("p", 0.1))
        for name, value in attributes.items():
            setattr(self, name, value)


@dataclass
class Configuration:
    width: int = 8
    names: tuple[str, ...] = ("a", "b")


def local_class(scale=2):
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return super().__call__(x) * scale

    return Local()


def model(**attributes):
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), Block(**attributes)))


def test_equal_models_have_no_differences():
    assert compare([model(), model(), model()]) == {}


def test_dropout_probabilities_may_differ():
    differing = compare([model(p=0.1), model(p=0.1), model(p=0.3)])
    assert {path: number.values for path, number in differing.items()} == {"1.1.drop.p": (0.1, 0.1, 0.3)}
    layers = [nn.LSTM(4, 4, num_layers=2, dropout=p) for p in (0.1, 0.2)]
    assert compare(layers)["dropout"].values == (0.1, 0.2)
    layers = [nn.MultiheadAttention(4, 2, dropout=p) for p in (0.1, 0.2)]
    assert compare(layers)["dropout"].values == (0.1, 0.2)


@pytest.mark.parametrize(
    ("one", "other", "brief"),
    [
        (4, 8, "4, 8"),
        (1.0, 1.5, "1.0, 1.5"),
        ("same", "valid", "'same', 'valid'"),
        (True, 1, "True, 1"),
        ((1, 2), (1, 3), r"\(1, 2\), \(1, 3\)"),
        ([1, [2]], [1, [3]], r"\[1, \[2\]\]"),
        ({"a": 1}, {"a": 2}, "{'a': 1}"),
        (torch.float32, torch.float64, "torch.float32, torch.float64"),
        (None, 1, "None, 1"),
        (torch.zeros(2), torch.ones(2), "a tensor of shape"),
        (np.zeros(2), np.ones(2), "array"),
        (torch.relu, torch.tanh, "relu"),
        (lambda x: x, lambda x: x + 1, "lambda"),
        (Configuration(8), Configuration(16), "width=8"),
        (SimpleNamespace(a=1), SimpleNamespace(a=2), "a=1"),
    ],
)
def test_other_differences_are_refused_by_name(one, other, brief):
    with pytest.raises(CannotFuse, match=f"^1.1.heads differs between the training jobs: .*{brief}"):
        compare([model(heads=one), model(heads=other)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: 4,
        lambda: float("nan"),
        lambda: {"a": [1, (2, None)], "b": torch.arange(3)},
        lambda: lambda x: x * 2,
        lambda: torch.relu,
        Configuration,
        lambda: SimpleNamespace(a=1, b=Configuration()),
        lambda: {1, 2},
        lambda: np.arange(3),
        lambda: nn.Linear,
        lambda: torch.device("cpu"),
    ],
)
def test_equal_values_of_each_training_are_equal(make):
    assert compare([model(value=make()), model(value=make())]) == {}


@pytest.mark.parametrize("make", [threading.Lock, torch.Generator, lambda: iter([1])])
def test_what_cannot_be_compared_is_refused_by_name(make):
    with pytest.raises(CannotFuse, match=r"^1\.1\.value cannot be compared"):
        compare([model(value=make()), model(value=make())])


def test_parameters_in_lists_are_refused():
    def listed():
        block = Block()
        block.weights = [block.linear.weight]
        return block

    with pytest.raises(
        CannotFuse, match=r"weights cannot be compared .* refers to the parameter or buffer linear.weight"
    ):
        compare([listed(), listed()])


def test_modules_outside_of_the_modules_are_refused():
    with pytest.raises(CannotFuse, match="no submodule"):
        compare([Block(layers=[nn.Linear(2, 2)]), Block(layers=[nn.Linear(2, 2)])])


def test_references_to_submodules_are_equal():
    def referring():
        block = Block()
        block.parts = [block.linear, block.drop]
        block.bound = block.linear.forward
        return block

    assert compare([referring(), referring()]) == {}


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 5), r"^weight differs .*: \(4, 4\), .*; \(5, 4\)"),
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, bias=False), "^parameters and buffers differ .*: bias"),
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4).double(), "^weight differs .*float32.*float64"),
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4).requires_grad_(False), "^weight differs .*; .*not trained"),
        (nn.ReLU, nn.GELU, "^the model is of a different class .*: ReLU, ReLU, GELU"),
        (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.GELU()), "^0 is of a different class"),
        (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), "^modules differ .*: 1"),
        (nn.ReLU, lambda: nn.ReLU().eval(), "^training differs between the training jobs: True, True, False"),
    ],
)
def test_structure_must_be_equal(one, other, message):
    with pytest.raises(CannotFuse, match=message):
        compare([one(), one(), other()])


def test_tied_weights_must_be_tied_in_all():
    def tied(yes):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if yes:
            layers[1].weight = layers[0].weight
        return layers

    assert compare([tied(True), tied(True)]) == {}
    with pytest.raises(CannotFuse, match=r"^1\.weight differs .*the same as 0\.weight"):
        compare([tied(False), tied(True)])


def test_classes_from_the_same_code_are_equal():
    assert compare([local_class(), local_class()]) == {}
    with pytest.raises(CannotFuse, match="of a different class"):
        compare([local_class(2), local_class(3)])


def test_hooks_are_compared():
    def hooked(factor):
        layer = nn.Linear(4, 4)
        layer.register_forward_hook(lambda module, arguments, output: output * factor)
        return layer

    assert compare([hooked(2), hooked(2)]) == {}
    with pytest.raises(CannotFuse, match="_forward_hooks differs"):
        compare([hooked(2), hooked(3)])
    with pytest.raises(CannotFuse, match="_forward_hooks differs"):
        compare([hooked(2), nn.Linear(4, 4)])


def test_hooks_that_collect_are_refused():
    def collecting():
        layer, collected = nn.Linear(4, 4), []
        layer.register_forward_hook(lambda module, arguments, output: collected.append(output))
        return layer

    with pytest.raises(CannotFuse, match="uses a list or dict"):
        compare([collecting(), collecting()])


def test_hooks_on_gradients_are_refused():
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for layer in layers:
        layer.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(CannotFuse, match="weight has a hook"):
        compare(layers)


def test_a_shared_parameter_is_refused():
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[1].weight = layers[0].weight
    with pytest.raises(CannotFuse, match="share a parameter"):
        compare(layers)


def test_given_attributes_of_the_model_are_not_compared():
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for layer in layers:
        layer.forward = threading.Lock()
    assert compare(layers, ignored=["forward"]) == {}


def test_lazy_modules_are_refused():
    with pytest.raises(CannotFuse, match="UninitializedParameter"):
        compare([nn.LazyLinear(4), nn.LazyLinear(4)])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_modules_are_refused():
    with pytest.raises(CannotFuse, match=r"the model is compiled by torch\.jit"):
        compare([torch.jit.script(nn.Linear(4, 4)) for _ in range(2)])


def test_traits_tell_models_apart_that_cannot_be_one_array():
    """An option of an activation does; a dropout probability, which may differ, does not."""

    def made_of(activation, dropout):
        return traits(nn.Sequential(nn.Linear(3, 3), activation, nn.Dropout(dropout)))

    plain = made_of(nn.GELU(), 0.1)
    assert plain == made_of(nn.GELU(), 0.4)
    assert plain != made_of(nn.GELU("tanh"), 0.1)
    assert " at 0x" not in repr(plain)


def test_a_class_that_uses_a_list_of_its_training_job_is_refused() -> None:
    def model():
        calls = []

        class Counting(nn.Module):
            def forward(self, x):
                calls.append(len(x))
                return x

        return Counting()

    with pytest.raises(CannotFuse, match="class of the model cannot be compared: a function that uses a list"):
        compare([model(), model()])


def test_each_model_is_walked_through_as_often_whatever_its_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    def walks(layers: int) -> int:
        models, count = [nn.Sequential(*(Block() for _ in range(layers))) for _ in range(2)], 0
        original = nn.Module.named_modules

        def counted(module, memo=None, prefix="", remove_duplicate=True):
            nonlocal count
            count += not prefix and any(module is model for model in models)
            return original(module, memo, prefix, remove_duplicate)

        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "named_modules", counted)
            compare(models)
        return count

    assert walks(8) == walks(2) > 0
