# ruff: noqa: SLF001 - private names of torch are what this module is for
"""FSDP2's own structures, which follow a change of the mesh: the only module that uses private names of torch.

Nothing is undone or applied again. A `DTensor` has two slots, its local tensor and its specification, and its global
shape does not depend on the mesh: both are replaced, and the parameter stays the same object. FSDP2's fields are
computed by its own initializer, from a parameter on the meta device, and then get the old parameter back.

The names are looked up, and tried with the present mesh, in `find_problem`.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "NotFollowed",
    "empty_like",
    "find_problem",
    "forget_meshes",
    "group_sizes",
    "int_of_each_group",
    "is_pending",
    "local_of",
    "managed_parameters",
    "move_to_mesh",
    "padded_of",
    "put",
    "reason_against",
    "rebind",
    "remember_ints",
    "reshard",
    "shard_dim",
    "sharded_modules",
]

_asked: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # parameter group -> the int of reshard_after_forward


class NotFollowed(Exception):
    """A sharded model cannot follow a change of its processes in place, for this reason."""


# ── what there is ─────────────────────────────────────────────────────────────────────────────────────


def _states(model: nn.Module) -> Iterable[Any]:
    return [module._get_fsdp_state() for module in sharded_modules([model])]


def _groups(models: Iterable[nn.Module]) -> list[Any]:
    """Return FSDP2's parameter groups, each once, in the order of the modules."""
    found: dict[int, Any] = {}
    for model in models:
        for state in _states(model):
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch < 2.12
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            found |= {id(group): group for group in groups}
    return list(found.values())


def managed_parameters(models: Iterable[nn.Module]) -> dict[int, Any]:
    """Return FSDP2's record of each parameter that it manages, by the ``id`` of the sharded parameter."""
    return {id(each.sharded_param): each for group in _groups(models) for each in group.fsdp_params}


def reshard(models: Iterable[nn.Module]) -> None:
    """Free whole parameters, as a root's after a validation: until then `parameters()` are other objects."""
    for module in sharded_modules(models):
        module.reshard()


def sharded_modules(models: Iterable[nn.Module]) -> list[Any]:
    """Return the modules to which ``fully_shard`` was applied."""
    from torch.distributed.fsdp import FSDPModule

    return [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]


def is_pending(models: Iterable[nn.Module]) -> bool:
    """Return whether there are gradients that are not reduced yet (``set_requires_gradient_sync(False)``)."""
    return any(
        group._partial_reduce_output is not None
        or any(
            each.unsharded_accumulated_grad is not None
            or (hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None)
            for each in group.fsdp_params
        )
        for group in _groups(models)
    )


def group_sizes(models: Iterable[nn.Module]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the lengths that the number of processes must divide, and the ints that must divide it.

    FSDP2 shards other dimensions than the first only evenly; an int of ``reshard_after_forward`` is refused by
    ``fully_shard``, which a process that resumes runs again, unless it divides the number of processes.
    """
    groups = _groups(models)
    lengths = {
        int(each._orig_size[each.fsdp_placement.dim])
        for group in groups
        for each in group.fsdp_params
        if each.fsdp_placement.dim > 0
    }
    return frozenset(lengths), frozenset(filter(None, map(_int_asked, groups)))


def reason_against(models: Iterable[nn.Module], mesh: DeviceMesh) -> str | None:
    """Return what does not follow a change in place, by name; ``None`` if all does; the same on all members."""
    models = list(models)
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    for group in _groups(models):
        info = group.mesh_info
        if not isinstance(info, FSDPMeshInfo):
            return "replicate() without shards"
        if info.mesh != mesh or info.mesh.ndim != 1:
            return "a mesh of its own for some parameters"
        for comm in ("_all_gather_comm", "_reduce_scatter_comm"):
            name = type(getattr(group, comm, None)).__name__
            if not name.startswith(("Default", "NoneType")):
                return "symmetric memory" if name.startswith("Symm") else f"its own communication ({name})"
        if getattr(info, "reduce_scatter_process_group", None) is not None:
            return "set_separate_reduce_scatter_group"
        for each in group.fsdp_params:
            if each.is_dtensor:
                return "tensor or expert parallelism"
            if each.mesh_info != info:
                return "a mesh of its own for some parameters"
            if type(local_of(each.sharded_param)) is not torch.Tensor:
                return f"the tensor subclass {type(local_of(each.sharded_param)).__name__}"
    return None


def shard_dim(tensor: Any) -> int:
    """Return the dimension in which a DTensor is sharded over a mesh of one dimension.

    Raises
    ------
    NotFollowed
        It has other placements.
    """
    from torch.distributed.tensor import Shard

    if len(tensor.placements) != 1 or type(tensor.placements[0]) is not Shard:
        raise NotFollowed(f"a tensor with the placements {tuple(tensor.placements)}")
    dim: int = tensor.placements[0].dim
    return dim % max(1, int(tensor.ndim))


def local_of(tensor: Any) -> torch.Tensor:
    """Return the local tensor itself of a DTensor."""
    local: torch.Tensor = tensor._local_tensor
    return local


def padded_of(tensor: Any, managed: Any) -> torch.Tensor:
    """Return the shard of a DTensor as FSDP2 keeps it, with its padding; see `put`."""
    local = local_of(tensor)
    if managed is None:
        return local
    data = managed._sharded_param_data
    if data.is_meta or data.data_ptr() != local.data_ptr():  # as after `to_empty`, until the first forward pass
        managed.reset_sharded_param()
    padded: torch.Tensor = managed._sharded_param_data.view(managed.padded_sharded_param_size)
    return padded


# ── changing it ───────────────────────────────────────────────────────────────────────────────────────


def put(tensor: Any, padded: torch.Tensor, length: int, managed: Any) -> None:
    """Give a DTensor another local tensor.

    Parameters
    ----------
    tensor
        The DTensor.
    padded
        As large as the largest shard, as FSDP2 needs it for its all-gather.
    length
        Of this shard in the sharded dimension.
    managed
        FSDP2's record if it is a parameter that FSDP2 manages, otherwise ``None``.
    """
    dim = managed.fsdp_placement.dim if managed is not None else shard_dim(tensor)
    tensor._local_tensor = padded.narrow(dim, 0, length)
    if managed is not None:
        managed._sharded_param_data = padded.view(-1)


def move_to_mesh(
    tensor: Any, mesh: DeviceMesh, shape: torch.Size | None = None, dtype: Any = None, dim: int = 0
) -> None:
    """Let a DTensor that FSDP2 does not manage refer to a mesh, and to a global `shape`, `dtype` and `dim` if given."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    meta, placements = tensor._spec.tensor_meta, tensor.placements
    if shape is not None:
        meta, placements = _meta_of(shape, dtype), (Shard(dim),)
    tensor._spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def empty_like(like: Any, shape: torch.Size, dtype: torch.dtype, dim: int) -> Any:
    """Return a DTensor on the mesh of another, without elements on this member yet."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    spec = DTensorSpec(like.device_mesh, (Shard(dim),), tensor_meta=_meta_of(shape, dtype))
    return DTensor(torch.empty(0, dtype=dtype, device=local_of(like).device), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _meta_of(shape: torch.Size, dtype: torch.dtype) -> Any:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    whole = torch.empty(shape, dtype=dtype, device="meta")
    return TensorMeta(whole.shape, whole.stride(), whole.dtype)


@torch.no_grad()
def rebind(models: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Let FSDP2 follow a new mesh; its parameters have the local tensors of the new shards already.

    With an int of ``reshard_after_forward`` this creates process groups: all members call it.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    smaller: dict[int, Any] = {}
    known: dict[tuple[Any, ...], tuple[dict[str, Any], Any]] = {}
    for group in _groups(models):
        after = _post_forward(group, info, smaller)
        for each in group.fsdp_params:
            _rebind_one(each, info, None if each.post_forward_mesh_info is None else (after or info), known)
        group.mesh_info = info
        group.post_forward_mesh_info = after


def _rebind_one(param: Any, info: Any, after: Any, known: dict[tuple[Any, ...], tuple[dict[str, Any], Any]]) -> None:
    """Rebind a parameter, with the fields of one that is like it, if there was one: they depend on nothing else.

    FSDP2's initializer takes most of the time of a change, for a model of many layers.
    """
    kept = param.sharded_param
    like = (type(param), param._orig_size, kept.dtype, param.fsdp_placement, param.device, id(after))
    if like not in known:
        known[like] = _rebind_parameter(param, info, after)
        return
    before, (fields, spec) = dict(vars(param)), known[like]
    try:
        vars(param).update(fields)
        _check_sizes(param, local_of(kept), param._sharded_param_data)
    except BaseException:
        vars(param).clear()
        vars(param).update(before)
        raise
    kept._spec = spec
    _forget_gathered(param)


def _forget_gathered(param: Any) -> None:
    """Drop buffers of the old size: they are created again at the next all-gather."""
    param.all_gather_outputs, param._unsharded_inner_tensors = [], []
    if hasattr(param, "_unsharded_param"):
        del param._unsharded_param


def _rebind_parameter(param: Any, info: Any, after: Any) -> tuple[dict[str, Any], Any]:
    """Rebind a parameter by FSDP2's own initializer; return the fields, and the spec, of all parameters like it."""
    kept, data = param.sharded_param, param._sharded_param_data
    before = dict(vars(param))
    whole = nn.Parameter(
        torch.empty(param._orig_size, dtype=kept.dtype, device="meta"),
        requires_grad=kept.requires_grad,
    )
    if hasattr(param, "_orig_param_uid"):  # torch >= 2.12 recognizes shared parameters by it
        whole._fsdp_orig_uid = param._orig_param_uid  # type: ignore[attr-defined]
    placement = param.fsdp_placement
    param.mesh_info, param.post_forward_mesh_info = info, after
    arguments = [whole, param.device, lambda _: placement]
    if "mesh_info" in inspect.signature(param._init_sharded_param).parameters:  # torch >= 2.12
        arguments.append(info)
    try:
        param._init_sharded_param(*arguments)
        if after is not None:
            param._init_sharded_post_forward_param_metadata(whole)
        _check_sizes(param, local_of(kept), data)
        spec = param.sharded_param._spec
    except BaseException:  # whatever it is, the parameter is as it was before it is raised again
        vars(param).clear()
        vars(param).update(before)
        param._setattr_on_modules(kept)
        raise
    kept._spec = spec
    param.sharded_param, param._sharded_param_data = kept, data
    param._setattr_on_modules(kept)
    changed = {
        name: value
        for name, value in vars(param).items()
        if value is not before.get(name) and not isinstance(value, torch.Tensor)
    }
    _forget_gathered(param)
    return changed, spec


def _check_sizes(param: Any, local: torch.Tensor, data: torch.Tensor) -> None:
    expected = tuple(param.sharded_size), param.padded_sharded_param_size.numel()
    if (tuple(local.shape), data.numel()) != expected:
        raise NotFollowed(f"shards of {tuple(local.shape)} where FSDP2 expects {expected[0]}")


def int_of_each_group(models: Iterable[nn.Module]) -> list[int | None]:
    """Return the int of ``reshard_after_forward`` of each parameter group; newcomers need to know it."""
    return [_int_asked(group) for group in _groups(models)]


def remember_ints(models: Iterable[nn.Module], ints: Iterable[int | None]) -> None:
    """Take over the ints of the other members."""
    for group, number in zip(_groups(models), ints, strict=True):
        _asked.pop(group, None)
        if number is not None:
            _asked[group] = number


def _int_asked(group: Any) -> int | None:
    """Return the int of ``reshard_after_forward``, which is remembered over sizes that it does not divide."""
    after, info = group.post_forward_mesh_info, group.mesh_info
    if after is not None and group not in _asked and after is not info and after != info:
        _asked[group] = after.shard_mesh_size
    return _asked.get(group)


def _post_forward(group: Any, info: Any, smaller: dict[int, Any]) -> Any:
    """Return the mesh for after the forward pass; the whole one for an int that does not divide its size."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    if group.post_forward_mesh_info is None:
        return None
    size, shards = _int_asked(group), info.shard_mesh_size
    if size is None or size >= shards or shards % size:
        return info
    if size not in smaller:  # one for each size; fully_shard creates one, with its process groups, in each call
        mesh = info.mesh
        names = tuple(f"{'/'.join(mesh.mesh_dim_names or ())}/{size}/{part}" for part in ("replicas", "shards"))
        smaller[size] = HSDPMeshInfo(
            DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size), mesh_dim_names=names),
            shard_mesh_dim=1,
            replicate_mesh_dim=0,
        )
    return smaller[size]


# ── whether it works ──────────────────────────────────────────────────────────────────────────────────


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled, by ``module.compile()`` or ``torch.compile(module)``."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _compiles_hooks() -> bool:
    """Return whether compiled code has FSDP2's collectives in it: an option of torch until 2.8 or later.

    Otherwise it ends before them, has whole parameters as its arguments, and follows a change.
    """
    import torch._dynamo.config as options

    return not getattr(options, "skip_fsdp_hooks", True)


def find_problem(models: Iterable[nn.Module], mesh: DeviceMesh) -> str | None:
    """Try to rebind models to their present mesh; return why that fails, or ``None``; nothing changes then.

    Each name used in this module is looked up on the way. Without an int of ``reshard_after_forward``, for which
    groups would be created, there is no communication.
    """
    models = list(models)
    try:
        if any(_is_compiled(module) for model in models for module in model.modules()) and _compiles_hooks():
            return "torch.compile with torch._dynamo.config.skip_fsdp_hooks = False"
        if (reason := reason_against(models, mesh)) is not None:
            return reason
        is_pending(models)
        ints = int_of_each_group(models)
        for group in _groups(models):
            for each in group.fsdp_params:
                _rebind_parameter(each, group.mesh_info, each.post_forward_mesh_info)
        remember_ints(models, ints)
    except Exception as error:  # noqa: BLE001 - another version of torch may fail in any way; nothing has changed
        return f"torch {torch.__version__} ({type(error).__name__}: {error})"
    return None


def forget_meshes() -> None:
    """Clear torch's caches, which keep old meshes, and so the threads and connections of their groups.

    A cache that a version does not have, or has elsewhere, keeps a few descriptors and threads for each change.
    """
    from torch.distributed import tensor as tensors

    with suppress(AttributeError):
        tensors.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    with suppress(AttributeError):
        torch._C._clear_DTensor_sharding_propagator_cache()
    with suppress(AttributeError, ImportError):
        from torch.distributed.tensor import _redistribute

        _redistribute._gen_transform_infos.cache_clear()
        for planner in _redistribute._planner_cache.values():
            vars(planner).clear()  # it refers to itself, and so would keep its mesh until a garbage collection
        _redistribute.clear_redistribute_planner_cache()
    with suppress(AttributeError, ImportError):
        from torch.distributed.tensor._collective_utils import MeshTopoInfo

        MeshTopoInfo.build_from_mesh.cache_clear()
