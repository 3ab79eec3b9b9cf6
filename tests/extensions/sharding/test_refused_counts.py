"""A number of processes that a model does not allow, as ``fully_shard`` in the user's function refuses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from freetrain_parsl import training_app
from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.training.extension import count_refused
from tests.executor.scenario import ScriptedPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # by torch 2.8 itself


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of three processes, of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield init_device_mesh("cpu", (3,))
    dist.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4))


def error_of(action: Callable[[], object]) -> Exception:
    with pytest.raises((NotImplementedError, ValueError, AssertionError)) as caught:
        action()
    return caught.value


def test_a_dimension_that_does_not_divide_tells_its_divisors(mesh: DeviceMesh) -> None:
    """The reason names the parameter as the module that is sharded does."""
    placed = {4: Shard(0), 6: Shard(1), 9: Shard(1)}
    model = nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 6))
    error = error_of(
        lambda: fully_shard(
            model, mesh=mesh, shard_placement_fn=lambda each: Shard(1) if each.ndim > 1 else placed[each.numel()]
        )
    )
    refused = count_refused(error)
    assert refused is not None
    assert (refused.size, refused.allowed) == (3, AllowedCounts(divisor_of=4))
    assert "1.weight of a Sequential, of shape (6, 4), is sharded over its dimension 1" in refused.reason


def test_an_int_of_reshard_after_forward_tells_its_multiples(mesh: DeviceMesh) -> None:
    refused = count_refused(error_of(lambda: fully_shard(net(), mesh=mesh, reshard_after_forward=2)))
    assert refused is not None
    assert (refused.size, refused.allowed) == (3, AllowedCounts(2))
    assert "reshard_after_forward=2 needs a multiple of 2" in refused.reason


def test_other_errors_of_fully_shard_and_of_the_function_are_its_own(mesh: DeviceMesh) -> None:
    """No number of processes would mend them."""
    assert count_refused(error_of(lambda: fully_shard(net(), mesh=mesh, reshard_after_forward=0))) is None
    assert count_refused(error_of(lambda: fully_shard(nn.ModuleList([net()]), mesh=mesh))) is None
    crooked = nn.Linear(6, 9)
    crooked.weight = nn.Parameter(torch.zeros(6, 9).t())
    assert count_refused(error_of(lambda: fully_shard(crooked, mesh=mesh))) is None
    assert count_refused(error_of(lambda: int("x"))) is None


class AsAllowed(ScriptedPolicy):
    """Gives as many of three nodes as the model allows, once they have all joined."""

    def allocate(self, pool, trainers, current, now):
        self.nodes = max((trainer.at_most(3) for trainer in trainers if len(pool) == 3 or current), default=0)
        return super().allocate(pool, trainers, current, now)


@training_app(max_nodes=3)
def train(session):
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.utils.data import TensorDataset

    net = torch.nn.Linear(4, 1)
    fully_shard(net, mesh=session.mesh, shard_placement_fn=lambda each: Shard(each.ndim - 1) if each.ndim > 1 else None)
    model, _ = session.prepare(net, torch.optim.SGD, lr=0.1)
    data = session.loader(TensorDataset(torch.ones(12, 4), torch.ones(12, 1)), batch_size=6)
    for _ in session.epochs(2):
        for x, y in data:
            session.step(torch.nn.functional.mse_loss(model(x), y))
    return session.world_size


@pytest.mark.cluster
def test_a_job_whose_first_start_is_refused_trains_on_another_number_of_nodes(start, caplog) -> None:
    """The user's code does not know of it; the log says it in one line."""
    site = start(nodes=3, policy=AsAllowed())
    future = train.options(name="t")()
    assert future.result(timeout=120) == 2
    run = site.until(lambda run: run.completed and run)
    assert [len(fragment.nodes) for fragment in run.fragments] == [3, 2]
    assert [fragment.failure for fragment in run.fragments] == [False, False]
    said = [record.message for record in caplog.records if "cannot run on 3 processes" in record.message]
    assert len(said) == 1
    assert "weight of a" in said[0]
    assert "divisors of 4" in said[0]
