"""Transfer of a training job's state from members that have it to members that need it, over their process group."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from freetrain_parsl.training.group import gpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.group.replica_groups import Pending

_MARK = "\0tensor"  # placeholder for a tensor in the skeleton of a state
_PACK = 1 << 20  # smaller tensors are sent together


@dataclass(frozen=True)
class _Plan:
    """Assignment of receivers to sources, round-robin."""

    sources: Sequence[int]
    receivers: Sequence[int]

    def receivers_of(self, rank: int) -> list[int]:
        if rank not in self.sources:
            return []
        return list(self.receivers[self.sources.index(rank) :: len(self.sources)])

    def source_of(self, rank: int) -> int:
        return self.sources[self.receivers.index(rank) % len(self.sources)]


def pass_on(group: Group, sources: Sequence[int], receivers: Sequence[int], state: dict[str, Any] | None) -> Any:
    """Send the state, or receive it.

    Parameters
    ----------
    group
        The members; all sources and receivers call this.
    sources, receivers
        Their ranks. All sources have the same state.
    state
        On a source: nested dictionaries, lists and tuples of tensors and of what ``weights_only=True`` accepts.

    Returns
    -------
    state
        On a receiver: the state, its tensors on the sender's device type if they can be sent directly, otherwise on the
        CPU. ``None`` on others.

    Raises
    ------
    PeerFailed
        A member has failed.
    """
    plan = _Plan(sources, receivers)
    if group.rank in plan.receivers:
        return _receive(group, plan.source_of(group.rank))
    if targets := plan.receivers_of(group.rank):
        assert state is not None, "sources have a state"
        _send(group, targets, state)
    return None


def _send(group: Group, targets: list[int], state: dict[str, Any]) -> None:
    tensors: list[torch.Tensor] = []
    skeleton = _lift_out(state, tensors)
    facts = [(list(tensor.shape), tensor.dtype, gpus.is_on_gpu(tensor) and group.over_gpus) for tensor in tensors]
    head = io.BytesIO()
    torch.save({"skeleton": skeleton, "facts": facts}, head)
    head_bytes = torch.frombuffer(bytearray(head.getvalue()), dtype=torch.uint8)
    packets = [torch.tensor([head_bytes.numel()]), head_bytes, *_packets(tensors, facts)]
    works = [work for packet in packets for work in _begin(group, dist.isend, packet, targets)]
    group.end_transfers(works)


def _receive(group: Group, source: int) -> Any:
    def receive(tensor: torch.Tensor) -> None:
        group.end_transfers(_begin(group, dist.irecv, tensor, [source]))

    length = torch.zeros(1, dtype=torch.int64)
    receive(length)
    head_bytes = torch.empty(int(length), dtype=torch.uint8)
    receive(head_bytes)
    head = torch.load(io.BytesIO(head_bytes.numpy().tobytes()), weights_only=True)
    device = gpus.device() if group.over_gpus else torch.device("cpu")
    tensors = [
        torch.empty(shape, dtype=dtype, device=device if direct else "cpu") for shape, dtype, direct in head["facts"]
    ]
    for packet, parts in _landing(tensors, head["facts"]):
        receive(packet)
        begin = 0
        for part in parts:
            size = part.numel() * part.element_size()
            _bytes_of(part).copy_(packet[begin : begin + size])
            begin += size
    return _put_back(head["skeleton"], tensors)


def _begin(group: Group, operation: Any, packet: torch.Tensor, ranks: Sequence[int]) -> list[Pending]:
    """Start to send or receive a packet."""
    return group.begin_transfers([dist.P2POp(operation, packet, rank) for rank in ranks])


def _packets(tensors: Sequence[torch.Tensor], facts: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    packets = []
    for run in _runs(tensors, facts):
        parts = [_bytes_of(tensor if direct else tensor.cpu()) for tensor, (_, _, direct) in run]
        packets.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return packets


def _landing(
    tensors: Sequence[torch.Tensor], facts: Sequence[tuple[Any, ...]]
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return the receive buffers, each with the tensors to fill from it unless it is a tensor's own memory."""
    landing: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for run in _runs(tensors, facts):
        parts = [tensor for tensor, _ in run]
        if len(parts) == 1:
            landing.append((_bytes_of(parts[0]), []))
        else:
            size = sum(part.numel() * part.element_size() for part in parts)
            landing.append((torch.empty(size, dtype=torch.uint8, device=parts[0].device), parts))
    return landing


def _runs(
    tensors: Sequence[torch.Tensor], facts: Sequence[tuple[Any, ...]]
) -> list[list[tuple[torch.Tensor, tuple[Any, ...]]]]:
    """Group small neighboring tensors, which are sent together; empty ones are not sent."""
    runs: list[list[tuple[torch.Tensor, tuple[Any, ...]]]] = []
    room = 0
    for tensor, fact in zip(tensors, facts, strict=True):
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            continue
        if not runs or size > room or runs[-1][0][1][2] != fact[2]:
            runs.append([])
            room = _PACK
        runs[-1].append((tensor, fact))
        room -= size
    return runs


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _lift_out(node: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a state without its tensors, which are appended to `tensors`."""
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return (_MARK, len(tensors) - 1)
    if isinstance(node, dict):
        lifted = type(node)((key, _lift_out(value, tensors)) for key, value in node.items())
        if hasattr(node, "_metadata"):  # contains the versions of a module's state
            lifted._metadata = node._metadata  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own way
        return lifted
    if type(node) in (list, tuple):
        return type(node)(_lift_out(value, tensors) for value in node)
    return node


def _put_back(node: Any, tensors: list[torch.Tensor]) -> Any:
    if type(node) is tuple and len(node) == 2 and node[0] == _MARK:
        return tensors[node[1]]
    if isinstance(node, dict):
        for key, value in node.items():
            node[key] = _put_back(value, tensors)
        return node
    if type(node) in (list, tuple):
        return type(node)(_put_back(value, tensors) for value in node)
    return node
