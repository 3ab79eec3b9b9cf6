"""What is a copy-on-write clone in a state is neither copied nor written twice."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from freetrain_parsl.errors import DamagedCheckpoint
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.training.checkpoints.background import HostBuffers
from freetrain_parsl.training.checkpoints.copy_on_write import address_of, clone_of, is_clone
from freetrain_parsl.training.checkpoints.format import Checkpoints, Facts
from freetrain_parsl.training.checkpoints.frozen import fill, take_out

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.storage.entry import Entry

BASE = torch.arange(2000.0).view(40, 50)


def state_of(base: torch.Tensor, adapter: float) -> dict[str, Any]:
    model = {"base": clone_of(base), "tied": base.detach(), "adapter": torch.full((3,), adapter)}
    return {"objects": {"model": model}, "list": [clone_of(base[0]), 1.5], "best": None}


def save(root: Path, name: str, state: dict[str, Any], step: int = 1) -> Entry:
    directory = CheckpointDirectory(root, name)
    directory.open()
    return Checkpoints(directory, name, keep=2).save(state, Facts(step, 0, "test"))


def assert_restored(root: Path, name: str, adapter: float) -> dict[str, Any]:
    restored = Checkpoints(CheckpointDirectory(root, name), name, keep=2).newest()
    assert restored is not None
    state = restored.state
    model = state["objects"]["model"]
    assert list(model) == ["base", "tied", "adapter"]
    assert torch.equal(model["base"], BASE)
    assert torch.equal(model["tied"], BASE)
    assert torch.equal(state["list"][0], BASE[0])
    assert model["adapter"].tolist() == [adapter] * 3
    assert "frozen" not in state
    return state


def test_a_base_is_written_once_and_loaded_with_each_state(tmp_path: Path) -> None:
    base = BASE.clone()
    entries = [save(tmp_path, name, state_of(base, adapter)) for name, adapter in (("a", 1.0), ("b", 2.0))]
    assert len({(entry.path / "frozen.pt").stat().st_ino for entry in entries}) == 1
    assert (entries[0].path / "state.pt").stat().st_size < BASE.nbytes
    assert (entries[0].path / "frozen.pt").stat().st_size < 1.5 * BASE.nbytes
    gc.collect()
    for name, adapter in (("a", 1.0), ("b", 2.0)):
        assert_restored(tmp_path, name, adapter)


def test_equal_bases_at_other_places_are_one_file(tmp_path: Path) -> None:
    entries = [save(tmp_path, name, state_of(BASE.clone(), 1.0)) for name in ("a", "b")]
    assert len({(entry.path / "frozen.pt").stat().st_ino for entry in entries}) == 1


def test_states_that_are_loaded_together_have_one_base_in_memory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path, name, state_of(BASE.clone(), 1.0))
    one, other = (Checkpoints(CheckpointDirectory(tmp_path, name), name, keep=2).newest() for name in ("a", "b"))
    assert one is not None
    assert other is not None
    places = {address_of(each.state["objects"]["model"]["base"]) for each in (one, other)}
    assert len(places) == 1
    one.state["objects"]["model"]["base"].zero_()
    assert torch.equal(other.state["objects"]["model"]["base"], BASE)


def test_a_damaged_base_is_refused(tmp_path: Path) -> None:
    entry = save(tmp_path, "a", state_of(BASE.clone(), 1.0))
    path = entry.path / "frozen.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedCheckpoint, match=r"frozen\.pt does not match its SHA-256"):
        Checkpoints(CheckpointDirectory(tmp_path, "a"), "a", keep=2).newest()


def test_what_was_written_to_is_in_the_state_itself() -> None:
    base = BASE.clone()
    state = state_of(base, 1.0)
    state["objects"]["model"]["base"].add_(1)
    rest, contents = take_out(state)
    assert torch.equal(rest["objects"]["model"]["base"], BASE + 1)
    assert rest["objects"]["model"]["tied"] is None
    assert len(contents) == 2  # the whole base, and one of its rows
    assert fill(rest, dict)
    assert torch.equal(rest["objects"]["model"]["tied"], BASE)


def test_a_state_without_clones_is_saved_as_it_is(tmp_path: Path) -> None:
    state = {"objects": {"model": {"weight": torch.ones(3)}}}
    rest, contents = take_out(state)
    assert rest == state
    assert not contents
    assert not (save(tmp_path, "a", state).path / "frozen.pt").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_any_type_and_shape_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = [torch.ones((), dtype=dtype), torch.ones(3, 4, dtype=dtype).t(), torch.ones(4, dtype=dtype)[1:3]]
    clones = [clone_of(tensor) for tensor in tensors]
    save(tmp_path, "a", {"objects": {"model": dict(zip("abc", clones, strict=True))}})
    del clones
    restored = Checkpoints(CheckpointDirectory(tmp_path, "a"), "a", keep=2).newest()
    assert restored is not None
    for tensor, name in zip(tensors, "abc", strict=True):
        assert torch.equal(restored.state["objects"]["model"][name], tensor)


def test_a_copy_in_host_memory_shares_clones() -> None:
    """And later writes do not reach it."""
    base = BASE.clone()
    model = {"base": clone_of(base), "weight": torch.ones(3)}
    taken = HostBuffers().copy(model)
    assert address_of(taken["base"]) == address_of(model["base"])
    assert is_clone(model["base"])
    model["base"].data.zero_()
    assert torch.equal(taken["base"], BASE)
