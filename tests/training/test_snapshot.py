"""A copy in host memory does not change with the training job."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from freetrain_parsl.training.checkpoints.background import HostBuffers, in_host_memory


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def some_state() -> dict[str, Any]:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "more": [1, "two", (None, 2.5)]}


def test_what_happens_to_the_original_does_not_reach_the_copy() -> None:
    state = some_state()
    before = [tensor.clone() for tensor in tensors(state)]
    taken = HostBuffers().copy(state)
    for tensor in tensors(state):
        tensor.zero_()
    state["more"].append(3)
    assert all(torch.equal(one, other) for one, other in zip(tensors(taken), before, strict=True))
    assert taken["more"] == [1, "two", (None, 2.5)]


def test_the_next_copy_uses_the_same_memory_where_shapes_agree() -> None:
    buffers = HostBuffers()
    first = buffers.copy({"same": torch.zeros(3), "grows": torch.zeros(2)})
    second = buffers.copy({"same": torch.ones(3), "grows": torch.ones(4), "new": torch.ones(1)})
    assert second["same"].data_ptr() == first["same"].data_ptr()
    assert [tensor.tolist() for tensor in second.values()] == [[1.0] * 3, [1.0] * 4, [1.0]]


def test_tied_weights_are_copied_and_written_once() -> None:
    tied = torch.randn(1000)
    taken = HostBuffers().copy({"a": tied, "b": tied, "c": tied.clone()})
    assert taken["a"].data_ptr() == taken["b"].data_ptr() != taken["c"].data_ptr()
    written = io.BytesIO()
    torch.save(taken, written)
    assert 8000 < written.tell() < 10000


def test_what_torch_hangs_onto_a_models_state_stays() -> None:
    """Module versions distinguish a model's old states from new ones."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    taken = HostBuffers().copy(state)
    assert isinstance(taken, OrderedDict)
    assert taken._metadata == state._metadata  # type: ignore[attr-defined]


def test_views_transposed_and_sparse_tensors_keep_their_values() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"view": whole[1:, ::2], "turned": whole.t(), "sparse": whole.to_sparse(), "empty": torch.empty(0)}
    taken = HostBuffers().copy(state)
    assert all(torch.equal(taken[name].to_dense(), state[name].to_dense()) for name in state)
    assert taken["view"].untyped_storage().nbytes() == 4 * taken["view"].numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_copy_from_a_gpu_is_complete_when_it_is_returned() -> None:
    tensor = torch.randn(4_000_000, device="cuda")
    buffers = HostBuffers()
    for _ in range(3):
        tensor += 1
        taken = buffers.copy({"x": tensor})["x"]
        assert taken.is_pinned()
        assert torch.equal(taken, tensor.cpu())


def test_what_is_in_host_memory_already_is_not_copied() -> None:
    state = {"x": torch.ones(2), "nested": [(torch.zeros(1),)], "step": 3}
    taken = in_host_memory(state)
    assert taken["x"] is not None
    assert taken["x"].data_ptr() == state["x"].data_ptr()
    assert taken["nested"][0][0].data_ptr() == state["nested"][0][0].data_ptr()
    assert taken["step"] == 3
