"""Batches of tensors that are fetched at once are those that are collated from single samples."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, default_collate
from training_crew import net

from freetrain_parsl.training.data.loader import Gather
from freetrain_parsl.training.fragment import run_local

if TYPE_CHECKING:
    from pathlib import Path

POSITIONS = torch.tensor([4, 0, 4, 2])
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 3),
        torch.randn(6),
        torch.arange(6, dtype=torch.int8),
        torch.rand(6, 2, 2) > 0.5,
        torch.randn(6, 2, dtype=torch.complex64),
        torch.randn(6, 5)[:, :-1],
        torch.randn(12, 3)[::2],
        torch.randn(3).expand(6, 3),
        torch.randn(6, 0),
        torch.tensor([[float("nan"), -0.0]] * 6),
    ],
)
def test_a_gathered_batch_is_the_collated_one(tensor: torch.Tensor) -> None:
    """In its bits, its type and its layout, in memory of its own."""
    dataset = TensorDataset(tensor, torch.arange(6))
    gather = Gather.of(dataset, None, 0)
    assert gather is not None
    assert gather.is_possible
    gathered = gather(POSITIONS, CPU)
    collated = default_collate([dataset[position] for position in POSITIONS.tolist()])
    assert type(gathered) is type(collated)
    for one, other in zip(gathered, collated, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert not one.numel() or one.data_ptr() not in {source.data_ptr() for source in dataset.tensors}


class Own(TensorDataset):
    """A dataset of the user's."""


@pytest.mark.parametrize(
    "arguments",
    [
        (Own(torch.zeros(6)), None, 0),
        ([torch.zeros(1)], None, 0),
        (TensorDataset(torch.zeros(6)), list, 0),
        (TensorDataset(torch.zeros(6)), None, 1),
    ],
)
def test_samples_and_batches_of_other_code_are_left_to_it(arguments: tuple[Any, Any, int]) -> None:
    assert Gather.of(*arguments) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(6, 3, requires_grad=True),
        torch.zeros(3, 2, 6).permute(2, 1, 0),  # collating keeps the layout of such samples
        torch.nn.Parameter(torch.zeros(6, 3), requires_grad=False),
        torch.zeros(6, 3).to_sparse(),
        torch.zeros(6, 3, device="meta"),
    ],
)
def test_unusual_tensors_are_collated(tensor: torch.Tensor) -> None:
    gather = Gather.of(TensorDataset(tensor), None, 0)
    assert gather is not None
    assert not gather.is_possible


def test_tensors_that_are_replaced_are_looked_at_again() -> None:
    dataset = TensorDataset(torch.zeros(6, 2))
    gather = Gather.of(dataset, None, 0)
    assert gather is not None
    assert gather.is_possible
    dataset.tensors = (torch.ones(6, 2),)
    assert gather.is_possible
    assert gather(POSITIONS, CPU)[0].sum() == 8
    dataset.tensors[0].requires_grad_()
    assert not gather.is_possible


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_training_is_the_same_whichever_way_its_batches_are_fetched(tmp_path: Path, micro_batch: int | None) -> None:
    """Also what it draws in its steps, from all generators, and if it changes the dataset between two epochs."""
    x, y = torch.randn(22, 6), torch.randint(0, 3, (22,))

    def train(session: Any, kind: type[TensorDataset]) -> list[Any]:
        dataset = kind(x, y)
        model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
        data = session.loader(dataset, 8, micro_batch=micro_batch)
        seen: list[Any] = []
        for epoch in session.epochs(4):
            if epoch == 2:
                dataset.tensors = (x.T.contiguous().T, y)  # no longer contiguous samples
            if epoch == 3:
                dataset.tensors = (2 * x, y)
            for samples, labels in data:
                inputs = samples + torch.randn(samples.shape) + np.random.rand() + random.random()  # noqa: NPY002
                seen += [*inputs.flatten().tolist(), *labels.tolist()]
                session.step(cross_entropy(model(inputs), labels))
        return [seen, [value.tolist() for value in model.state_dict().values()]]

    gathered, collated = (run_local(train, kind, directory=tmp_path / kind.__name__) for kind in (TensorDataset, Own))
    assert gathered == collated
