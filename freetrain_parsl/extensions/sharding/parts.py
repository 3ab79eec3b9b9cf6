"""The parts of a sharded state in a copy: what they are, and how they lie in memory, one after another."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.sharding.rounds import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.tensor import DTensor

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.training.node_memory import Shelf

__all__ = ["Label", "StateParts", "digest", "pack", "unpack"]

_ALIGNED = 64  # bytes
_BITS = 62  # of a digest: it is sent as a signed integer


def digest(text: str) -> int:
    """Return a number that identifies a text."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big") >> (64 - _BITS)


@dataclass(frozen=True)
class Label:
    """What a copy is.

    Parameters
    ----------
    job
        Identifies the training job and its code.
    generation, size
        Of the group that made the copy, on all its members.
    step
        Optimizer steps of the state.
    owner
        Rank of the member whose part it is.
    is_own
        Whether this is the copy that the member itself keeps, which has the rest of the state, too.
    """

    job: int
    generation: int
    size: int
    step: int
    owner: int
    is_own: bool

    @staticmethod
    def of_job(options: SessionOptions) -> int:
        """Return `job` for these options; a directory that was removed and made anew is that of another job."""
        code = None if options.code is None else options.code.identity
        try:
            place = (options.checkpoint_root / options.name).stat().st_ino
        except OSError:  # nothing was saved yet
            place = None
        return digest(repr((options.name, str(options.checkpoint_root), place, options.seed, options.call, code)))

    @classmethod
    def on(cls, shelf: Shelf) -> Label | None:
        """Return the label of the copy on a shelf; ``None``: there is none."""
        content = shelf.read()
        return None if content is None else cls(**json.loads(content[0].partition(b"\n")[0]))

    def numbers(self) -> list[int]:
        """Return it as numbers."""
        return [int(value) for value in astuple(self)]

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> Label:
        """Return the label with these `numbers`."""
        job, generation, size, step, owner, is_own = numbers
        return cls(job, generation, size, step, owner, is_own=bool(is_own))


def pack(label: Label, body: Any) -> bytes:
    """Return the head of a shelf."""
    buffer = io.BytesIO()
    torch.save(body, buffer)
    return json.dumps(asdict(label)).encode() + b"\n" + buffer.getvalue()


def unpack(head: bytes) -> Any:
    """Return the body of a head that `pack` has made; it is loaded without running code from it."""
    return torch.load(io.BytesIO(head.partition(b"\n")[2]), map_location="cpu", weights_only=True)


class StateParts:
    """The sharded tensors of a state, the same on all members; those with the same memory are kept once.

    Parameters
    ----------
    tensors
        Their global descriptions.
    names
        The names of each.
    """

    def __init__(self, tensors: list[Layout], names: list[list[str]]) -> None:
        self.tensors = tensors
        self.names = names

    @classmethod
    def of(cls, shards: Mapping[str, DTensor]) -> StateParts:
        """Return the parts of the sharded tensors of a state.

        Raises
        ------
        UsageError
            One is sharded in another way than by one of its dimensions.
        """
        from torch.distributed.tensor import Shard

        tensors: list[Layout] = []
        names: list[list[str]] = []
        seen: dict[tuple[Any, ...], int] = {}
        for name, shard in shards.items():
            placement = shard.placements[0]
            if len(shard.placements) > 1 or type(placement) is not Shard:
                raise UsageError(f"{name} is distributed as {shard.placements}")
            local = shard.to_local()
            # The storage object, as empty parts have no address: all members have to find the same.
            storage = local.untyped_storage()._cdata  # noqa: SLF001 - no public identity
            memory = (storage, local.storage_offset(), local.dtype, shard.shape)
            if memory in seen:
                names[seen[memory]].append(name)
                continue
            seen[memory] = len(names)
            names.append([name])
            tensors.append(Layout(tuple(shard.shape), shard.dtype, placement.dim))
        return cls(tensors, names)

    def as_plain(self) -> list[tuple[Any, ...]]:
        """Return it as values that can be saved."""
        return [(each.shape, each.dtype, each.dim, names) for each, names in zip(self.tensors, self.names, strict=True)]

    @classmethod
    def from_plain(cls, plain: list[tuple[Any, ...]]) -> StateParts:
        """Return what `as_plain` has made a value of."""
        return cls([Layout(*facts) for *facts, _ in plain], [names for *_, names in plain])

    def size(self, owner: int, owners: int) -> int:
        """Return the bytes of an owner's parts."""
        return sum(_padded(tensor, owner, owners) for tensor in self.tensors)

    def views(self, content: torch.Tensor, owner: int, owners: int) -> Iterator[torch.Tensor]:
        """Yield an owner's part of each tensor in memory of this `size`."""
        begin = 0
        for tensor in self.tensors:
            shape = tensor.local_shape(owner, owners)
            size = torch.Size(shape).numel() * tensor.dtype.itemsize
            yield content[begin : begin + size].view(tensor.dtype).view(shape)
            begin += _padded(tensor, owner, owners)


def _padded(tensor: Layout, owner: int, owners: int) -> int:
    size = torch.Size(tensor.local_shape(owner, owners)).numel() * tensor.dtype.itemsize
    return -(-size // _ALIGNED) * _ALIGNED
