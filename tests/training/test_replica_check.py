"""The parts of the comparison of replicas, without processes."""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from freetrain_parsl.errors import ReplicasDiffer
from freetrain_parsl.training.checkpoints.parameters import TrainableFlags
from freetrain_parsl.training.checkpoints.state import SessionState
from freetrain_parsl.training.group import regrouping
from freetrain_parsl.training.group.process_group import Group
from freetrain_parsl.training.group.regrouping import GroupMember
from freetrain_parsl.training.replicas.accusation import Since, differences, sentence
from freetrain_parsl.training.replicas.check import ReplicaCheck, Standing, all_equal
from freetrain_parsl.training.replicas.checksum import STEPS, Checksum, Rotation
from freetrain_parsl.training.replicas.contents import Fact, plain
from freetrain_parsl.training.step.buffers import persistent_buffers

HASHES = st.integers(0, 2**20 - 1)


# ── the condition ─────────────────────────────────────────────────────────────────────────────────


def sums(hashes: list[int]) -> tuple[float, float]:
    """Return the sums of numbers and squares, added up as a group does."""
    votes = torch.tensor([[value, value * value] for value in hashes], dtype=torch.float64)
    total, squares = votes.sum(0).tolist()
    return total, squares


@given(st.lists(HASHES, min_size=1, max_size=30))
def test_members_agree_exactly_if_all_hashes_are_equal(hashes: list[int]) -> None:
    assert all_equal(len(hashes), *sums(hashes)) == (len(set(hashes)) == 1)


@given(HASHES, HASHES, st.integers(1, 8192), st.integers(0, 3))
def test_the_sums_are_exact_for_thousands_of_members(usual: int, other: int, count: int, different: int) -> None:
    different = min(different, count)
    hashes = [usual] * (count - different) + [other] * different
    assert all_equal(count, *sums(hashes)) == (len(set(hashes)) == 1)


# ── checksums ─────────────────────────────────────────────────────────────────────────────────────

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def bits(dtype: torch.dtype, length: int, seed: int) -> torch.Tensor:
    """Return a tensor of arbitrary bits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (length,), generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (length * size,), generator=generator, dtype=torch.uint8).view(dtype)


@given(st.sampled_from(DTYPES), st.sampled_from([1, 2, 3, 511, 1023, 1025, 5000, 20_001]), st.integers(0, 9), st.data())
def test_any_bit_counts(dtype: torch.dtype, length: int, seed: int, data: st.DataObject) -> None:
    tensor = bits(dtype, length, seed)
    changed = tensor.clone()
    place = data.draw(st.integers(0, tensor.numel() - 1))
    if dtype == torch.bool:
        changed[place] = ~changed[place]
    else:
        size = tensor.element_size()
        changed.view(torch.uint8)[place * size + data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    assert Checksum([tensor]).read() == Checksum([tensor.clone()]).read() != Checksum([changed]).read()


@pytest.mark.parametrize("length", [100, 5001])
def test_the_place_in_memory_does_not_count(length: int) -> None:
    """A member of an array has its parameters inside of larger tensors."""
    tensor = torch.randn(length)
    shifted = torch.cat([torch.zeros(1), tensor])[1:]
    strided = torch.stack([tensor, tensor], dim=1)[:, 0]
    assert Checksum([tensor]).read() == Checksum([shifted]).read() == Checksum([strided]).read()


@pytest.mark.parametrize(
    "change", [lambda x: -x, lambda x: x.flip(0), lambda x: x.roll(1)], ids=["sign", "flip", "roll"]
)
@pytest.mark.parametrize("length", [20, 5000])
def test_the_order_and_the_signs_count(change: Any, length: int) -> None:
    """The plain sum of the words of a permutation is that of every other one."""
    permutation = torch.randperm(length).float()
    assert Checksum([permutation]).read() != Checksum([change(permutation)]).read()


def test_tensors_are_not_interchangeable() -> None:
    one, other = torch.randn(5), torch.randn(5)
    assert Checksum([one, other]).read() != Checksum([other, one]).read()


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 3_000_000), max_size=40))
def test_each_element_is_in_one_part(sizes: list[int]) -> None:
    tensors = [torch.empty(1).expand(size) for size in sizes]
    rotation = Rotation(tensors)
    parts = rotation.parts
    assert {rotation.part_at(step) for step in range(7, 7 + STEPS)} - {None} == set(range(len(parts)))
    seen: dict[int, list[tuple[int, int]]] = {}
    for piece in (piece for part in parts for piece in part):
        size = sizes[piece.number]
        seen.setdefault(piece.number, []).append((piece.begin, size if piece.end is None else piece.end))
    for number, size in enumerate(sizes):
        ranges = sorted(seen[number])
        assert ranges[0][0] == 0
        assert ranges[-1][1] == size
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))


def test_large_models_are_compared_in_sixteen_equal_parts() -> None:
    sizes = [1_000_000] * 20 + [30_000_000] + [100] * 50
    parts = Rotation([torch.empty(1).expand(size) for size in sizes]).parts
    assert len(parts) == STEPS
    numbers = [sum((sizes[p.number] if p.end is None else p.end) - p.begin for p in part) for part in parts]
    assert max(numbers) < 1.5 * sum(sizes) / STEPS


def test_small_models_are_compared_in_whole_at_every_fourth_step() -> None:
    rotation = Rotation([torch.empty(10)] * 6)
    assert [rotation.part_at(step) for step in range(6)] == [0, None, None, None, 0, None]


# ── plain values ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (True, 1), ([0.9, 0.99], (0.9, 0.99)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (float("nan"),) * 2],
)
def test_equal_values_are_equal_however_they_are_kept(one: object, other: object) -> None:
    assert repr(plain(one, whole=True)) == repr(plain(other, whole=True))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.1 + 1e-16),
        (-1, -2),
        (2**60, 2**60 + 1),
        ("a", "b"),
        (None, 0),
        ([1, 2], [2, 1]),
        (torch.tensor(0.1), torch.tensor(0.2)),
        (torch.zeros(2), torch.zeros(2, 1)),
        ({"a": 1}, {"a": 2}),
        (deque([1, 2]), deque([2, 1])),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), torch.optim.SGD([torch.zeros(1)], lr=0.2)),
    ],
)
def test_other_values_are_not(one: object, other: object) -> None:
    assert repr(plain(one, whole=True)) != repr(plain(other, whole=True))


def test_of_a_long_list_the_end_is_compared_at_every_step_and_all_of_it_in_full() -> None:
    losses = [float(number) for number in range(1000)]
    assert plain(losses, whole=False) != plain([*losses[:-1], -1.0], whole=False)
    assert plain(losses, whole=False) == plain([-1.0, *losses[1:]], whole=False)
    assert plain(losses, whole=True) != plain([-1.0, *losses[1:]], whole=True)


# ── members of a group ────────────────────────────────────────────────────────────────────────────


class Replica:
    """A member with a model of 16 parts, and its comparison."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(50)))
        self.model.register_buffer("mean", torch.zeros(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = SessionState(0, lambda: None)  # type: ignore[arg-type,return-value]  # no checkpoint
        self.state.objects = {"model": self.model, "optimizer": self.optimizer}
        self.notes: list[str] = []
        self.check = ReplicaCheck("net", self.state, self.notes.append)

    def votes(self, step: int, *, whole: bool = False) -> int:
        self.state.training_metrics.step = step
        return self.check.votes(whole=whole)[0]


def found_after(change: Any) -> int | None:
    """Return after how many steps two members differ, of which one is changed after the first comparison."""
    one, other = Replica(), Replica()
    assert one.votes(0) == other.votes(0)
    with torch.no_grad():
        change(other)
    return next((step for step in range(1, 17) if one.votes(step) != other.votes(step)), None)


@pytest.mark.parametrize("layer", [0, 5, 49])
def test_a_difference_that_stays_is_found_within_sixteen_steps(layer: int) -> None:
    assert found_after(lambda replica: replica.model[layer].weight[3, 3].add_(1e-6)) is not None


def test_hyperparameters_and_the_position_are_compared_at_every_step() -> None:
    def other_rate(replica: Replica) -> None:
        replica.optimizer.param_groups[0]["lr"] = 0.2

    def frozen(replica: Replica) -> None:
        replica.model[3].requires_grad_(False)

    def ahead(replica: Replica) -> None:
        replica.state.cursor.position = 8

    def looped(replica: Replica) -> None:
        replica.check.loop = lambda: [("it", 3)]
        replica.check.votes(whole=True)

    for change in (other_rate, frozen, ahead, looped):
        assert found_after(change) == 1


def test_nothing_is_found_in_equal_members() -> None:
    assert found_after(lambda _replica: None) is None


def test_everything_is_compared_at_once_when_it_matters() -> None:
    one, other = Replica(), Replica()
    for replica in (one, other):
        replica.votes(0)
        replica.model(torch.ones(1, 400)).sum().backward()
        replica.optimizer.step()
    assert one.votes(1, whole=True) == other.votes(1, whole=True)
    other.optimizer.state[other.model[9].bias]["momentum_buffer"][0] += 1e-3
    assert one.votes(1) == other.votes(1)
    assert one.votes(1, whole=True) != other.votes(1, whole=True)


def test_a_buffer_that_is_assigned_anew_is_the_one_that_is_compared() -> None:
    def assign(replica: Replica) -> None:
        replica.model.mean = torch.ones(3)

    assert found_after(assign) is not None


def test_a_model_in_the_loop_state_is_compared_as_a_prepared_one() -> None:
    """An average by hand: its parameters are, and the running statistics that it has copied are not."""
    one, other = Replica(), Replica()
    averages = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    averages[1].load_state_dict(averages[0].state_dict())
    for replica, average in zip((one, other), averages, strict=True):
        replica.check.loop = lambda average=average: [("ema", average)]
    averages[1][1].running_mean.add_(1)
    assert one.votes(1, whole=True) == other.votes(1, whole=True)
    averages[1][0].bias.data.add_(1)
    assert one.votes(1, whole=True) != other.votes(1, whole=True)


def test_on_a_gpu_the_checksum_of_the_boundary_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no step waits for the GPU; what differs is found one boundary later."""
    read: list[Checksum] = []
    monkeypatch.setattr(Checksum, "is_pending", property(lambda _checksum: True))
    monkeypatch.setattr(Checksum, "read", lambda checksum, wait=Checksum.read: read.append(checksum) or wait(checksum))
    one, other = Replica(), Replica()
    assert one.votes(0) == other.votes(0)
    read.clear()
    assert one.votes(1) == other.votes(1)
    assert read == []
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(1e-6)
    assert one.votes(2) == other.votes(2)
    assert len(read) == 2
    assert one.votes(3) != other.votes(3)


# ── in a new group ────────────────────────────────────────────────────────────────────────────────


class Meeting:
    """A group of which one member is real, and who would send the state to whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *places: tuple[int, ...]) -> None:
        self.rank, self.size = 0, len(places)
        self.passed: tuple[list[int], list[int]] | None = None
        self.compared: list[int] = []
        self._places = places
        monkeypatch.setattr(regrouping, "pass_on", self._pass_on)

    def gather(self, _place: torch.Tensor) -> list[torch.Tensor]:
        return [torch.tensor(place) for place in self._places]

    def _pass_on(self, _group: Any, sources: list[int], receivers: list[int], _state: Any) -> None:
        self.passed = (sources, receivers)

    def agree(self) -> None:
        member = GroupMember(None, lambda _: None, None, lambda _: None)  # type: ignore[arg-type,return-value]  # not used
        member.group = self  # type: ignore[assignment]  # all that is used of one
        member.meet_replicas = lambda _group, _standings, peers: self.compared.extend(peers)
        member.exchange(lambda: self._places[0])


def place(position: int, *, turn: int = 5, kind: int = 1, fingerprint: int = 7, begun: int = 1) -> tuple[int, ...]:
    return (begun, 0, 0, position, 0, 0, 0, *Standing(turn, 0, 0, 0, 0, kind, fingerprint))


def test_members_behind_receive_the_state_and_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    newcomer = place(0, begun=0, turn=0, fingerprint=9)
    meeting = Meeting(monkeypatch, place(8), place(16), newcomer, place(16))
    meeting.agree()
    assert (meeting.compared, meeting.passed) == ([1, 3], ([1, 3], [0, 2]))


def test_members_that_have_run_the_code_after_a_boundary_are_not_compared_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure can reach one of them in the vote, and another one when it has already set the next learning rate."""
    meeting = Meeting(monkeypatch, place(16, turn=6, fingerprint=8), place(16), place(8))
    meeting.agree()
    assert (meeting.compared, meeting.passed) == ([1], ([1], [2]))


def test_on_unlike_processors_replicas_with_other_bits_become_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(monkeypatch, place(16), place(16, kind=2, fingerprint=8))
    meeting.agree()
    assert meeting.passed == ([0], [1])


def test_the_user_is_told_once_that_bits_are_not_compared() -> None:
    member = Replica()
    group = Group(size=2)
    for kinds in ((1, 1), (1, 2), (1, 2)):
        member.check.meet(group, [Standing(0, 0, 0, 0, 0, kind, 0) for kind in kinds], [0, 1])
    (note,) = member.notes
    assert note.startswith("its processes run on processors of different kinds")


def test_newcomers_alone_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(monkeypatch, place(0, begun=0), place(0, begun=0))
    meeting.agree()
    assert (meeting.compared, meeting.passed) == ([], None)


# ── buffers by kind ───────────────────────────────────────────────────────────────────────────────


def test_running_statistics_are_known_by_their_kind() -> None:
    class Own(nn.BatchNorm1d):
        def __init__(self) -> None:
            super().__init__(2)
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("cache", torch.zeros(1), persistent=False)

    model = nn.ModuleList([Own(), nn.InstanceNorm1d(2, track_running_stats=True), nn.SyncBatchNorm(2)])
    kinds = {name: place.is_statistic for name, place in persistent_buffers(model)}
    assert {name for name, statistic in kinds.items() if not statistic} == {"0.seen"}
    assert len(kinds) == 10


# ── messages ──────────────────────────────────────────────────────────────────────────────────────


def test_values_that_look_alike_are_not_shown() -> None:
    facts = {
        rank: [Fact("loop", "best", repr(value), "0.3333333333")] for rank, value in enumerate([1 / 3, 0.3333333333])
    }
    (found,) = differences(facts)
    assert str(found) == "best is not the same on rank 0 and rank 1"


def test_the_first_kind_is_explained_and_the_others_are_counted() -> None:
    facts = {
        rank: [
            Fact("parameter", "parameter model.weight", str(rank), ""),
            Fact("loop", "it of session.state", str(rank), str(rank)),
            Fact("hyperparameter", "lr of optimizer group 0", "0.1", "0.1"),
        ]
        for rank in range(2)
    }
    message = sentence("net", differences(facts), Since(plain=4, tensors=2, now=5))
    assert message.startswith(
        "job 'net': its processes no longer agree: it of session.state is 0 on rank 0, 1 on rank 1, and 1 other value "
        "(after step 5, equal after step 4); usually it was computed from something that differs between processes"
    )


def test_a_difference_that_has_gone_is_said_to_have_gone() -> None:
    message = sentence("net", [], Since(plain=4, tensors=2, now=5))
    assert "differed for a moment and are equal again (step 5)" in message


def test_the_error_can_be_sent_and_is_final() -> None:
    error = pickle.loads(pickle.dumps(ReplicasDiffer("job 'net': …")))
    assert (type(error), str(error)) == (ReplicasDiffer, "job 'net': …")
    assert not error.transient
    assert not error.resumable


# ── frozen parameters ─────────────────────────────────────────────────────────────────────────────


def flags_of(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def watched(**objects: nn.Module) -> TrainableFlags:
    flags = TrainableFlags()
    flags.watch(objects)
    return flags


def test_only_what_the_loop_has_changed_is_kept() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    flags = watched(model=model)
    assert flags.changes() == {}
    model.requires_grad_(True)
    model.bias.requires_grad_(False)
    assert flags.changes() == {"model.weight": True, "model.bias": False}


def test_changes_are_made_in_another_process_and_others_undone() -> None:
    model = nn.Linear(2, 2)
    flags = watched(model=model)
    model.weight.requires_grad_(False)
    flags.load({"model.bias": False, "model.gone": False})
    assert flags_of(model) == [True, False]
    flags.load({})
    assert flags_of(model) == [True, True]
