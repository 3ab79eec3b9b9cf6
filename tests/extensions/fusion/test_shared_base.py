"""Frozen tensors that are the same in all members: once in memory, whatever members do to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from freetrain_parsl.extensions.fusion.forward import shared_base
from freetrain_parsl.extensions.fusion.forward.shared_base import FROZEN
from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox
from freetrain_parsl.training.checkpoints import copy_on_write
from freetrain_parsl.training.checkpoints.copy_on_write import address_of, clone_of, is_clone_of
from tests.extensions.fusion.sweep_trainings import alone, distance, together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.extensions.fusion.sweep_trainings import Outcome

ROUNDING = 1e-10
BUILT: dict[int, nn.Module] = {}
PLACES: list[int] = []


class Adapted(nn.Module):
    """A frozen network with a trained adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.words = nn.Embedding(16, 8)
            self.body = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 8))
            self.register_buffer("scale", torch.rand(8))
        self.requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.words(x).mean(1)) * self.scale
        return self.up(self.down(hidden))


class Normalized(nn.Module):
    """A frozen batch normalization, which changes its buffers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x.double() / 16))


class Averaged(nn.Module):
    """Changes a frozen parameter in its forward pass, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.slow = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.head.weight, alpha=0.1)
        return self.head(x.double() @ self.slow / 16)


class OnFeatures(nn.Module):
    """A trained head, beside a frozen model of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


KINDS: dict[str, Callable[[], nn.Module]] = {"lora": Adapted, "norm": Normalized, "average": Averaged}


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(16, (24, 4), generator=generator), torch.randint(4, (24,), generator=generator))


def frozen(model: nn.Module) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


def watch() -> None:
    """Count the places in memory of a frozen parameter of all models so far."""
    PLACES.append(len({address_of(frozen(model)[0]) for model in BUILT.values()}))


def tune(
    session: Any,
    *,
    me: int,
    lr: float = 0.01,
    act: str = "",
    kind: str = "lora",
    epochs: int = 2,
    teacher: bool = False,
) -> dict[str, Any]:
    """Train the adapter; the second member acts on the base after five steps."""
    model = KINDS[kind]().double()
    features = nn.Linear(4, 8).double().requires_grad_(False) if teacher else None
    if features is not None:
        nn.init.constant_(features.weight, 0.1)
        nn.init.zeros_(features.bias)
        model = OnFeatures().double()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=lr)
    objects = [model, optimizer] if features is None else [model, features, optimizer]
    prepared = session.prepare(*objects)
    model, optimizer = prepared[0], prepared[-1]
    BUILT[me] = model if features is None else prepared[1]
    batches = session.loader(tokens(), batch_size=4)
    losses: list[float] = []
    for _ in session.epochs(epochs):
        for x, y in batches:
            if me == 1 and len(losses) == 5:
                ACTS[act](model, optimizer)
            if me == 0:
                watch()
            output = model(x if features is None else prepared[1](x.double() / 16))
            loss = nn.functional.cross_entropy(output, y)
            session.step(loss)
            losses.append(loss.item())
    return {"losses": losses, "model": {name: value.clone() for name, value in model.state_dict().items()}}


def merge(model: Any, _optimizer: object) -> None:
    """As PEFT's `merge_adapter` and `unmerge_adapter`: through ``.data``, which version counters do not see."""
    delta = torch.full_like(model.body[0].weight, 0.5)
    model.body[0].weight.data += delta
    with torch.no_grad():
        model(torch.zeros(2, 4, dtype=torch.long))
    model.body[0].weight.data -= delta


def scale_in_place(model: Any, _optimizer: object) -> None:
    with torch.no_grad():
        model.body[0].weight.mul_(1.5)


def unfreeze(model: Any, optimizer: Any) -> None:
    model.body[0].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model.body[0].weight]})


def assign(model: Any, _optimizer: object) -> None:
    model.body[0].weight.data = model.body[0].weight.data * 1.5


def load(model: Any, _optimizer: object) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


ACTS: dict[str, Callable[[Any, Any], object]] = {
    "": lambda *_: None,
    "merge": merge,
    "data": lambda model, _: model.body[0].weight.data.mul_(1.5),
    "in place": scale_in_place,
    "view": lambda model, _: model.words.weight.data[0].zero_(),
    "numpy": lambda model, _: model.body[0].weight.numpy().__imul__(1.5),
    "buffer": lambda model, _: model.scale.mul_(1.5),
    "assign": assign,
    "load": load,
    "unfreeze": unfreeze,
}


@pytest.fixture(autouse=True)
def _nothing_built() -> None:
    BUILT.clear()
    PLACES.clear()


def assert_as_alone(root: Path, points: Sequence[Mapping[str, Any]]) -> Outcome:
    outcome = together(root / "array", points, tune)
    for number, point in enumerate(points):
        value = alone(root / "alone", str(number), point, tune)
        for name, expected in value.items():
            assert distance(outcome.value(str(number))[name], expected) < ROUNDING, (number, name)
    return outcome


def test_a_frozen_base_is_in_memory_once(tmp_path: Path) -> None:
    """At each step, and the adapters are those of each training job alone."""
    points = [{"me": number, "lr": 0.01 * (number + 1)} for number in range(4)]
    outcome = together(tmp_path / "array", points, tune)
    assert PLACES == [1] * 12
    assert outcome.engine.fused_steps == 12
    assert_as_alone(tmp_path / "again", points)


@pytest.mark.parametrize("act", [act for act in ACTS if act not in ("", "unfreeze")])
def test_a_member_that_writes_to_the_base_changes_its_own(tmp_path: Path, act: str) -> None:
    points = [{"me": number, "lr": 0.01 * (number + 1), "act": act} for number in range(3)]
    outcome = assert_as_alone(tmp_path, points)
    assert outcome.engine.fused_steps == 12
    assert not outcome.engine.reason


def test_a_member_that_trains_the_base_trains_its_own(tmp_path: Path) -> None:
    outcome = assert_as_alone(tmp_path, [{"me": number, "act": "unfreeze"} for number in range(3)])
    assert outcome.engine.fused_steps >= 5


@pytest.mark.parametrize("kind", ["norm", "average"])
def test_what_the_model_changes_in_its_forward_pass_is_stacked(tmp_path: Path, kind: str) -> None:
    points = [{"me": number, "lr": 0.05 * (number + 1), "kind": kind} for number in range(3)]
    outcome = assert_as_alone(tmp_path, points)
    assert outcome.engine.fused_steps == 12


def test_a_frozen_model_beside_the_trained_one_is_shared(tmp_path: Path) -> None:
    """As the features of a perceptual loss, or the reference model of DPO."""
    points = [{"me": number, "lr": 0.05 * (number + 1), "teacher": True} for number in range(3)]
    outcome = together(tmp_path / "array", points, tune)
    assert PLACES == [1] * 12
    assert outcome.engine.fused_steps == 12
    assert_as_alone(tmp_path / "again", points)


def test_a_base_is_shared_again_after_a_resume(tmp_path: Path) -> None:
    """Loading a checkpoint gives each member memory of its own."""
    for epochs in (1, 2):
        PLACES.clear()
        points = [{"me": number, "lr": 0.01 * (number + 1), "epochs": epochs} for number in range(3)]
        outcome = together(tmp_path / "array", points, tune)
        assert PLACES == [1] * 6
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, tune)
        assert distance(outcome.value(str(number))["model"], value["model"]) < ROUNDING


def test_a_base_is_shared_again_after_a_resume_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, the checkpoint is loaded once more, when the batches begin."""
    mailbox = ArrayMailbox()
    monkeypatch.setitem(ACTS, "pause", lambda *_: mailbox.end())
    points = [{"me": number, "lr": 0.01 * (number + 1)} for number in range(3)]
    together(tmp_path / "array", [{**point, "act": "pause"} for point in points], tune, mailbox=mailbox)
    assert PLACES == [1] * 6
    PLACES.clear()
    BUILT.clear()
    outcome = together(tmp_path / "array", points, tune)
    assert PLACES == [1] * 6
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, tune)
        assert distance(outcome.value(str(number))["model"], value["model"]) < ROUNDING


def test_all_is_stacked_where_torch_has_no_clones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_on_write, "_lazy_clone", None)
    outcome = assert_as_alone(tmp_path, [{"me": number, "lr": 0.01 * (number + 1)} for number in range(3)])
    assert outcome.engine.fused_steps == 12
    assert PLACES[:12] == [3] * 12


def as_mapped(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    torch.save(tensor, path)
    loaded: torch.Tensor = torch.load(path, mmap=True)
    return loaded


def as_loaded(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    torch.save(tensor, path)
    loaded: torch.Tensor = torch.load(path)
    return loaded


MEMORY: dict[str, Callable[[torch.Tensor, Path], torch.Tensor]] = {
    "mapped": as_mapped,
    "loaded": as_loaded,
    "numpy": lambda tensor, _: torch.from_numpy(tensor.numpy().copy()),
    "shared": lambda tensor, _: tensor.share_memory_(),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_that_torch_has_not_allocated_is_shared_and_written_to(tmp_path: Path, kind: str) -> None:
    """A clone of what `torch.load` returns would end the process at the first write."""
    models = [nn.Linear(3, 2).requires_grad_(False) for _ in range(3)]
    for model in models:
        model.weight = nn.Parameter(MEMORY[kind](torch.arange(6.0).view(2, 3), tmp_path / "weight.pt"), False)
        FROZEN.share([model])
    assert len({address_of(model.weight) for model in models}) == 1
    models[0].weight.data.zero_()
    assert models[1].weight.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_checkpoints_have_one_base_in_common(tmp_path: Path) -> None:
    points = [{"me": number, "lr": 0.01 * (number + 1)} for number in range(3)]
    together(tmp_path, points, tune)
    files = list(tmp_path.glob("[012]/step-*/frozen.pt"))
    assert len(files) >= 3
    assert len({file.stat().st_ino for file in files}) == 1
    assert PLACES == [1] * 12


def test_what_no_model_has_any_longer_is_forgotten() -> None:
    known = shared_base.FrozenTensors()
    models = [Adapted(), Adapted()]
    known.share(models)
    assert len({address_of(model.words.weight) for model in models}) == 1
    assert sum(map(len, known._known.values())) == len(frozen(models[0])) + 1
    models[0].words.weight.data.zero_()
    del models[1]
    model = None  # noqa: F841 - the loop variable of a comprehension would keep it
    known.purge()
    assert sum(map(len, known._known.values())) == len(frozen(models[0]))


def test_models_without_frozen_parameters_are_left_alone() -> None:
    model = nn.BatchNorm1d(3)
    FROZEN.share([model])
    assert model.running_mean is not None
    assert not copy_on_write.is_clone(model.running_mean)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 2.0], dtype=torch.bfloat16), True),
        (torch.tensor([True]), torch.tensor([True]), True),
        (torch.ones(2, 3), torch.ones(3, 2).t(), False),
    ],
)
def test_same_is_bitwise(one: torch.Tensor, other: torch.Tensor, same: bool) -> None:
    assert copy_on_write.are_same(one, other) is same


def test_a_clone_that_is_written_to_moves() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    clone = clone_of(tensor[1])
    assert address_of(clone) == address_of(tensor[1])
    assert is_clone_of(clone, tensor[1])
    read = copy_on_write.plain(clone)
    tensor.data.zero_()
    assert clone.tolist() == read.tolist() == [3, 4, 5]
    assert not is_clone_of(clone, tensor[1])


LARGE = """
import sys
from pathlib import Path

import torch
from tests.extensions.fusion.sweep_trainings import together


def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def tune(session, lr):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)]).requires_grad_(False)
    model = torch.nn.Sequential(base, torch.nn.Linear(1024, 4))
    model, optimizer = session.prepare(model, torch.optim.SGD(model[1].parameters(), lr))
    data = session.loader(torch.utils.data.TensorDataset(torch.ones(8, 1024)), 4)
    for _ in session.epochs(2):
        for (x,) in data:
            session.step(model(x).square().mean())


torch.set_num_threads(1)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
outcome = together(Path(sys.argv[1]), [{"lr": 0.01 * number} for number in range(8)], tune)
assert outcome.engine.fused_steps == 4, outcome.ends
print(resident("VmHWM") - before)
"""


@pytest.mark.slow  # a process of its own that imports torch
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="not Linux")
def test_eight_members_never_have_eight_bases_in_memory(tmp_path: Path) -> None:
    """Of 64 MiB: at most two while one is loaded, whatever is saved; the rest is what torch loads when it computes."""
    command = [sys.executable, "-c", LARGE, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert float(found.stdout.splitlines()[-1]) < 4 * 64
