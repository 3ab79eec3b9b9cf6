"""What cannot follow a change of the processes is named, before anything moves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from freetrain_parsl import run_local
from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.sharding import memory, structures
from freetrain_parsl.extensions.sharding.resharding import OtherModel, Resharding
from freetrain_parsl.extensions.sharding.rounds import Layout
from freetrain_parsl.training.group.process_group import Group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    group = Group()
    yield group.mesh(torch.device("cpu"))
    group.leave()


def sharded(mesh: DeviceMesh) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


class _OwnGather:
    """Stands for communication that a user has written."""


def with_communication_of_its_own(model: Any) -> None:
    structures._groups([model])[0]._all_gather_comm = _OwnGather()


def with_a_separate_reduce_scatter_group(model: Any) -> None:
    structures._groups([model])[0].mesh_info.reduce_scatter_process_group = object()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # by torch itself
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_communication_of_its_own, "its own communication (_OwnGather)"),
        (with_a_separate_reduce_scatter_group, "set_separate_reduce_scatter_group"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_does_not_follow_is_named(mesh: DeviceMesh, change: Any, named: str) -> None:
    model = sharded(mesh)
    assert Resharding({"model": model}).problem(mesh) is None
    change(model)
    assert Resharding({"model": model}).problem(mesh) == named


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # by torch itself
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules_follow_unless_collectives_are_compiled(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    model = sharded(mesh)
    (model if whole else model[0]).compile(backend="eager")
    assert Resharding({"model": model}).problem(mesh) is None
    monkeypatch.setattr(structures, "_compiles_hooks", lambda: True)  # an option of torch 2.8
    assert "skip_fsdp_hooks" in str(Resharding({"model": model}).problem(mesh))


def test_parameters_that_are_alike_get_the_fields_that_fsdp2_computes_for_each(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4), nn.Embedding(4, 4))
    model[0].weight.requires_grad_(False)
    fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    structures.rebind([model], mesh)
    for group in structures._groups([model]):
        for each in group.fsdp_params:
            kept = each.sharded_param
            shared = dict(vars(each))
            structures._rebind_parameter(each, group.mesh_info, each.post_forward_mesh_info)
            own = vars(each)
            assert own.keys() == shared.keys()
            assert all(own[name] == shared[name] for name in own if not isinstance(own[name], torch.Tensor))
            assert each.sharded_param is kept
            assert kept._spec == each._sharding_spec


def test_another_mesh_is_named(mesh: DeviceMesh) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    assert Resharding({"model": sharded(other)}).problem(mesh) == "a mesh of its own for some parameters"


def test_optimizer_states_with_other_placements_are_named(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    model = sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = next(model.parameters())
    resharding = Resharding({"model": model, "optimizer": optimizer})
    assert resharding.obstacle(Group(), 2) is None
    optimizer.state[first]["whole"] = DTensor.from_local(torch.zeros(4, 4), mesh, [Replicate()], run_check=False)
    assert "Replicate" in str(resharding.obstacle(Group(), 2))


def test_too_little_memory_for_both_parts_is_named(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetrain_parsl.extensions.sharding.memory.free_memory", lambda _device: 20 << 20)
    resharding = Resharding({"model": sharded(mesh)})
    reason = "the new shards need 32 MiB beside the old ones, and 20 MiB are free"
    assert resharding.obstacle(Group(), 2) == reason


def test_the_members_on_a_node_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 MiB are enough for each of two processes alone, and on two nodes, but not for both on one node."""
    monkeypatch.setattr(memory, "free_memory", lambda _device: 40 << 20)

    def of_member(rank: int, device: str = "cpu") -> list[memory.Need]:
        return memory.needs([Layout((1 << 20,), torch.float32, 0, device)], 2, rank, budget=16 << 20)

    here = of_member(0)
    assert memory.shortage([here, []]) is None, "the second one leaves"
    assert memory.shortage([here, of_member(1)]) == (
        "the new shards need 68 MiB beside the old ones, and 40 MiB are free"
    )
    assert memory.shortage([of_member(0, "cuda"), of_member(1, "cuda")]) is None, "each has its own"
    monkeypatch.setattr(memory, "host_of_this_process", lambda: "other")
    assert memory.shortage([here, of_member(1)]) is None


def test_sharded_tensors_that_come_into_the_loop_s_state_later_are_an_error(mesh: DeviceMesh) -> None:
    """A process that joins, or resumes, has none to restore them into."""
    model = sharded(mesh)
    weight = model[0].weight.detach()
    loop: dict[str, Any] = {"average": {"weight": weight.clone()}, "last": None}
    resharding = Resharding({"model": model})
    resharding.follow_loop(loop.items)
    loop["average"]["weight"] = weight + 1
    resharding.check_loop()
    loop["last"] = weight + 1
    with pytest.raises(UsageError, match=r"session\.state: last has got a sharded tensor that its first value has not"):
        resharding.check_loop()


def test_gradients_that_are_not_reduced_postpone_the_change(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    resharding = Resharding({"model": model})
    assert not resharding.is_pending
    model.set_requires_gradient_sync(False)
    model(torch.randn(3, 4)).sum().backward()
    assert resharding.is_pending
    model.set_requires_gradient_sync(True)
    model(torch.randn(3, 4)).sum().backward()
    assert not resharding.is_pending


def test_a_process_that_joins_with_another_model_is_refused_and_the_others_continue_without_it(
    mesh: DeviceMesh,
) -> None:
    mine, other = Resharding({"model": sharded(mesh)}), Resharding({"model": sharded(mesh)[:1]})
    described = other.entries(other.tensors()), structures.int_of_each_group(other.models)

    def pair(rank: int, *said: int) -> Any:
        answers = iter(said)
        return SimpleNamespace(
            size=2,
            rank=rank,
            sum=lambda values: values + next(answers),
            gather_objects=lambda problem: ["", problem or "it differs"],
            broadcast=lambda _own, _source: described,
        )

    with pytest.raises(UsageError, match=r"has another model than the others: model\.1\.weight is only there"):
        mine._agree_on_entries(pair(1, 1, 0), 0, has_state=False)
    with pytest.raises(OtherModel, match="another model than the others: it differs"):
        mine._agree_on_entries(pair(0, 0, 1), 0, has_state=True)


def without_a_mesh(session: Any, model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)


def after_prepare(session: Any, model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    session.prepare(model, torch.optim.SGD, lr=0.1)
    fully_shard(model, mesh=session.mesh)
    next(iter(session.epochs(1)))


@pytest.mark.parametrize(
    ("shard", "advice"),
    [
        (without_a_mesh, r"write fully_shard\(…, mesh=session\.mesh\)"),
        (after_prepare, "got the model before fully_shard"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_misplaced_fully_shard_is_refused_with_what_to_write(tmp_path: Path, shard: Any, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        run_local(partial(shard, model=nn.Linear(4, 2)), directory=tmp_path)
