"""Sharded states (FSDP2 and other DTensors): saved by all members together, loaded by any number of ranks.

`torch.distributed.checkpoint` writes the sharded tensors into the checkpoint's folder ``shards``; everything else goes
into the state file, with a placeholder for each of them. The folder's index is a pickle: it is read with a list of
permitted types, so that an untrusted checkpoint cannot run code.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch import nn
from torch.optim import Optimizer

from freetrain_parsl.errors import DamagedCheckpoint, PeerFailed, UsageError
from freetrain_parsl.storage.entry import SHARDS
from freetrain_parsl.storage.problems import is_unavailable, storage_error
from freetrain_parsl.training.checkpoints.format import is_spread

if TYPE_CHECKING:  # takes half a second to import: only if a state is sharded
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from freetrain_parsl.training.checkpoints.state import Stateful

INDEX = ".metadata"
"""The index file in that folder."""

_MARK = "freetrain.sharded"
_PART = "part"  # in a placeholder: this member's part, which is in memory already
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}  # fmt: skip


def is_sharded(objects: Mapping[str, Stateful]) -> bool:
    """Return whether the members hold different parts of the objects' state."""
    return any(is_spread(leaf) for target in objects.values() for leaf in _leaves(target.state_dict()))


def check_meshes(objects: Mapping[str, Stateful], mesh: DeviceMesh) -> None:
    """Check that everything sharded is sharded over the session's mesh.

    Raises
    ------
    UsageError
        A tensor is sharded over another mesh.
    """
    for name, target in objects.items():
        for leaf in filter(is_spread, _leaves(target.state_dict())):
            if leaf.device_mesh != mesh:
                raise UsageError(
                    f"session.prepare: the {name} is sharded over a mesh that does not belong to this session; "
                    "use fully_shard(…, mesh=session.mesh)"
                )


def check_optimizers(objects: Mapping[str, Stateful]) -> None:
    """Check that no optimizer has parameters as they were before ``fully_shard``, which would never change.

    Raises
    ------
    UsageError
        One has.
    """
    models = [each for each in objects.values() if isinstance(each, nn.Module)]
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for name, optimizer in objects.items():
        groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
        parameters = [parameter for group in groups for parameter in group["params"]]
        if parameters and not any(id(each) in known or is_spread(each) for each in parameters):
            raise UsageError(
                f"session.prepare: the {name} has none of the model's parameters: fully_shard has replaced them; make "
                "the optimizer after it"
            )


def split(state: Any) -> tuple[Any, dict[str, DTensor]]:
    """Separate the sharded tensors from a state.

    Returns
    -------
    plain, shards
        The state with a placeholder for each of them; name -> tensor.
    """
    shards: dict[str, DTensor] = {}

    def take_out(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not is_spread(leaf):
            return leaf
        name = "/".join(quote(str(key), safe="") for key in path)
        shards[name] = leaf
        return {_MARK: name, "shape": list(leaf.shape), "dtype": leaf.dtype}

    return _map(state, take_out), shards


def local_parts(shards: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
    """Return this member's part of each tensor."""
    return {name: shard.to_local() for name, shard in shards.items()}


def put_back(plain: Any, parts: Mapping[str, tuple[torch.Tensor, int]]) -> Any:
    """Return a state that `fill` can load without reading files, from what `split` has made of it.

    Parameters
    ----------
    plain
        The state with placeholders.
    parts
        Name -> this member's part, and the dimension by which the tensor is sharded over the members of now.
    """

    def put_in(leaf: Any, path: tuple[Any, ...]) -> Any:  # noqa: ARG001 - of `_map`
        mark = _mark_of(leaf)
        return leaf if mark is None else {**leaf, _PART: parts[mark]}

    return _map(plain, put_in)


def fill(saved: Any, target: Stateful, checkpoint: Path) -> Any:
    """Return a state that `target` can load, sharded over the members in the same way as the target's own.

    Parameters
    ----------
    saved
        One object's state as it was saved, with placeholders or whole tensors, by any number of members.
    target
        The object; its sharded tensors are filled in place.
    checkpoint
        The checkpoint's directory.

    Raises
    ------
    DamagedCheckpoint
        The sharded tensors cannot be read.
    KeyError
        The target has no matching tensor.
    """
    state, wanted = _with_places(saved, target)
    if wanted:
        _read(checkpoint / SHARDS, wanted)
    return state


def joined(plain: Any, target: Stateful) -> Any:
    """Return a state from `split` that `target` can load, with the target's own sharded tensors as they are.

    Raises
    ------
    KeyError
        The target has no matching tensor.
    """
    return _with_places(plain, target)[0]


def _with_places(saved: Any, target: Stateful) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a state with the target's tensors instead of placeholders, and these by name."""
    wanted: dict[str, torch.Tensor] = {}
    places = _Places(target)
    if not places.any_spread and not any(_mark_of(leaf) for leaf in _leaves(saved)):
        return saved, wanted

    def put_in(leaf: Any, path: tuple[Any, ...]) -> Any:
        mark = _mark_of(leaf)
        if mark is not None:
            place = places.find(path, torch.Size(leaf["shape"]), leaf["dtype"])
            if _PART in leaf:
                _take(place, *leaf[_PART])
            else:
                wanted[mark] = place
            return place
        if isinstance(leaf, torch.Tensor):
            return places.spread(path, leaf)
        return leaf

    return _map(saved, put_in), wanted


class _Places:
    """The tensors of an object to load into: its own, and those that an optimizer will create for its parameters."""

    def __init__(self, target: Stateful) -> None:
        self._present: dict[tuple[Any, ...], torch.Tensor] = {}
        _map(target.state_dict(), self._note)
        groups = target.param_groups if isinstance(target, torch.optim.Optimizer) else []
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self.any_spread = any(map(is_spread, [*self._present.values(), *self._parameters]))

    def find(self, path: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor to read a sharded one into."""
        present = self._present.get(path)
        if present is not None and present.shape == shape:
            return present
        parameter = self._parameter(path)
        if parameter is None:
            raise KeyError(f"there is no tensor of shape {tuple(shape)} at {'.'.join(map(str, path))}")
        if parameter.shape == shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        whole = torch.empty(shape, dtype=dtype, device=parameter.device)
        return _replicate(whole, parameter) if is_spread(parameter) else whole

    def spread(self, path: tuple[Any, ...], whole: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor, sharded as in the target."""
        like = self._present.get(path)
        if like is None:
            like = self._parameter(path)
        if like is None or not is_spread(like) or like.shape != whole.shape:
            return whole
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor), "it is sharded"
        mesh = like.device_mesh
        return distribute_tensor(whole.to(mesh.device_type), mesh, like.placements, src_data_rank=None)

    def _note(self, leaf: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(leaf, torch.Tensor):
            self._present[path] = leaf
        return leaf

    def _parameter(self, path: tuple[Any, ...]) -> Any:
        """Return the parameter that an entry of an optimizer's state belongs to."""
        if len(path) == 3 and path[0] == "state" and isinstance(path[1], int) and path[1] < len(self._parameters):
            return self._parameters[path[1]]
        return None


def _take(place: torch.Tensor, part: torch.Tensor, dim: int) -> None:
    """Fill a tensor from this member's part of it.

    Raises
    ------
    PeerFailed
        It is sharded in another way now; the copies are not used again and again, see `recall`.
    """
    target = place
    if is_spread(place):
        from torch.distributed.tensor import DTensor, Shard

        assert isinstance(place, DTensor), "it is sharded"
        target = place.to_local()
        if len(place.placements) == 1 and isinstance(place.placements[0], Shard) and place.placements[0].dim != dim:
            target = torch.empty(0)
    if target.shape != part.shape:
        raise PeerFailed("a tensor is sharded in another way than in the copies in memory, which are not used")
    with torch.no_grad():
        target.copy_(part)


def _read(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Fill tensors, sharded or not, from a folder; each member reads its own parts, without communication."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    index = read_index(folder)

    class Reader(FileSystemReader):
        """Uses the index that was read safely."""

        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return index

    try:
        with _alone_on_purpose():
            load(wanted, storage_reader=Reader(folder), no_dist=True)
    except CheckpointException as error:
        problem = _first_failure(error)
        if is_unavailable(problem) and not isinstance(problem, FileNotFoundError):
            raise storage_error(f"cannot read {folder}", folder.parents[2], problem) from error
        raise DamagedCheckpoint(f"damaged checkpoint {folder.parent}: {_reason(error)}") from error


def read_index(folder: Path) -> Metadata:
    """Read the index that `torch.distributed.checkpoint` wrote for a folder, and reject any other content.

    Raises
    ------
    DamagedCheckpoint
        It is missing, contains something else, or refers to files outside the folder.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        names = {str(place.relative_path) for place in index.storage_data.values()}
    except OSError as error:
        if is_unavailable(error) and not isinstance(error, FileNotFoundError):
            raise storage_error(f"cannot read {path}", folder.parents[2], error) from error
        raise DamagedCheckpoint(f"damaged checkpoint {folder.parent}: unreadable {SHARDS}/{INDEX} ({error})") from error
    except (
        EOFError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        raise DamagedCheckpoint(f"damaged checkpoint {folder.parent}: unreadable {SHARDS}/{INDEX} ({error})") from error
    if not isinstance(index, Metadata):
        raise DamagedCheckpoint(f"damaged checkpoint {folder.parent}: {SHARDS}/{INDEX} is not an index")
    for name in names:
        if Path(name).name != name:
            raise DamagedCheckpoint(f"damaged checkpoint {folder.parent}: {SHARDS}/{INDEX} refers to {name}")
    return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """Suppress torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _first_failure(error: BaseException) -> BaseException:
    """Return the error of the first member that failed."""
    failures = getattr(error, "failures", {})
    return next(iter(failures.values()))[0] if failures else error


def _reason(error: BaseException) -> str:
    problem = _first_failure(error)
    return getattr(problem, "strerror", None) or str(problem).strip().splitlines()[0]


def _replicate(whole: torch.Tensor, like: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _mark_of(leaf: Any) -> str | None:
    return leaf[_MARK] if isinstance(leaf, dict) and _MARK in leaf else None


def _map(value: Any, change: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a nested state with its leaves changed; placeholders are leaves."""
    if isinstance(value, dict) and _MARK not in value:
        result = copy.copy(value)  # keeps the module versions that torch attaches to a model's state
        for key, item in value.items():
            result[key] = _map(item, change, (*path, key))
        return result
    if type(value) in (list, tuple):
        return type(value)(_map(item, change, (*path, position)) for position, item in enumerate(value))
    return change(value, path)


def _leaves(value: Any) -> list[Any]:
    return [leaf for _, leaf in leaves_by_path(value)]


def leaves_by_path(value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the leaves of nested dictionaries, lists and tuples, each with its keys and indices."""
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    _map(value, lambda leaf, path: leaves.append((path, leaf)))
    return leaves
