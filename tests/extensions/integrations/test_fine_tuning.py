"""Fine-tuning sweeps with transformers and TRL are fused, each training job with the result that it has alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fine_tuning import by_accelerate, by_dpo, by_trainer, by_trl, digests_of_kinds, loop
from torch.utils._pytree import tree_leaves

from freetrain_parsl.extensions.fusion.engine.array import Array
from freetrain_parsl.extensions.fusion.forward.adapters import within
from tests.extensions.fusion.sweep_trainings import alone, distance, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

pytestmark = [
    pytest.mark.slow,  # transformers takes seconds to import
    pytest.mark.filterwarnings("default"),  # third-party code has its own deprecations
]

RATES = [{"lr": 0.01 * (number + 1)} for number in range(3)]
FLOAT32 = 3e-6
"""Transformers computes losses in float32, whatever the model's type."""


def assert_as_alone(
    root: Path, points: Sequence[Mapping[str, Any]], function: Callable[..., Any], within: float = 1e-9
) -> None:
    outcome = together(root / "array", points, function, seeds=range(len(points)))
    assert not outcome.engine.reason
    assert outcome.engine.fused_steps == 8
    for number, point in enumerate(points):
        expected = alone(root / "alone", str(number), point, function, seed=number)
        for name, value in outcome.value(str(number)).items():
            limit = max(within, FLOAT32) if name == "losses" else within
            assert distance(value, expected[name]) <= limit, name


def test_a_cache_that_the_model_returns_is_that_of_each_training_job(tmp_path: Path) -> None:
    assert_as_alone(tmp_path, [{**point, "use_cache": True} for point in RATES], loop)


@pytest.mark.parametrize("function", [by_trainer, by_trl, by_accelerate, by_dpo])
def test_trainers_are_fused(tmp_path: Path, function: Callable[..., Any]) -> None:
    assert_as_alone(tmp_path, RATES, function)


RANKS = (2, 4, 8)
NEAR = 1e-9


@pytest.mark.parametrize("copies", [False, True], ids=["the network without adapters", "a copy of the adapters"])
def test_dpo_with_adapters_and_either_reference(tmp_path: Path, copies: bool) -> None:
    """PEFT switches adapters off, or to the copy, between the forward and the backward pass of each step."""
    pytest.importorskip("peft")
    assert_as_alone(tmp_path, [{**point, "copies": copies} for point in adapters(alpha=(4.0, 16.0, 64.0))], by_dpo)


def adapters(**options: Any) -> list[dict[str, Any]]:
    """Return points of ranks that differ; what is a tuple differs, too."""
    return [
        {
            "lr": 0.01 * (number + 1),
            "adapter": {
                "rank": rank,
                **{name: value[number] if isinstance(value, tuple) else value for name, value in options.items()},
            },
        }
        for number, rank in enumerate(RANKS)
    ]


@pytest.mark.parametrize(
    ("optimizer", "options", "clip"),
    [
        ("SGD", {"weight_decay": 0.1, "momentum": 0.9}, 0.5),
        ("Adam", {"weight_decay": 0.1}, None),
        ("AdamW", {"weight_decay": 0.1}, 0.5),
        ("RMSprop", {}, None),
        ("Adagrad", {}, None),
        ("NAdam", {}, None),
        ("Adafactor", {}, None),
    ],
)
def test_ranks_that_differ_are_padded_exactly(
    tmp_path: Path, optimizer: str, options: dict[str, Any], clip: float | None, padding: list[float]
) -> None:
    """Parameters, gradients and states have the true shapes, and what pads them stays zero."""
    pytest.importorskip("peft")
    points = [
        {**point, "optimizer": optimizer, "options": options, "clip": clip}
        for point in adapters(alpha=(4.0, 16.0, 64.0))
    ]
    assert_as_alone(tmp_path, points, loop, NEAR)
    assert len(padding) > 8
    assert max(padding) == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": (0.1, 0.2, 0.3), "alpha": (4.0, 16.0, 64.0)},
        {"use_rslora": (True, False, True)},
        {"use_dora": True, "alpha": (4.0, 16.0, 64.0)},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["dropout", "rsLoRA in some", "DoRA", "all linear layers", "embeddings"],
)
def test_kinds_of_adapters_of_ranks_that_differ(tmp_path: Path, options: dict[str, Any], padding: list[float]) -> None:
    pytest.importorskip("peft")
    assert_as_alone(tmp_path, adapters(**options), loop, NEAR)
    assert max(padding) == 0.0


@pytest.mark.parametrize("function", [by_trainer, by_trl, by_accelerate])
def test_trainers_with_ranks_that_differ(tmp_path: Path, function: Callable[..., Any]) -> None:
    pytest.importorskip("peft")
    assert_as_alone(tmp_path, adapters(alpha=(4.0, 16.0, 64.0)), function, NEAR)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target_modules": (["q_proj"], ["v_proj"], ["q_proj", "v_proj"])},
            "modules differ between the training jobs",
        ),
        ({"use_dora": (False, True, False)}, "q_proj.lora_magnitude_vector.default"),
        ({"dropout": (0.0, 0.1, 0.2)}, "lora_dropout.default is of a different class"),
    ],
    ids=["other layers", "DoRA in some", "no dropout in some"],
)
def test_adapters_of_other_kinds_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("peft")
    outcome = together(tmp_path, adapters(**options), loop)
    assert outcome.engine.fused_steps == 0
    assert message in caplog.text


def test_ranks_are_no_part_of_the_digest_of_a_cohort() -> None:
    """It is the same in each process, and another one for adapters that cannot be in one array."""
    pytest.importorskip("peft")
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from fine_tuning import digests_of_kinds
print(digests_of_kinds())
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    digests = digests_of_kinds()
    assert ast.literal_eval(other) == digests
    assert digests[0] == digests[1]
    assert digests[2] == digests[3]
    assert len(set(digests)) == 3


def test_ranks_with_an_optimizer_that_divides_zero_by_zero_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("peft")
    points = [{**point, "options": {"eps": 0.0}} for point in adapters()]
    outcome = together(tmp_path, points, loop)
    assert outcome.engine.fused_steps == 0
    assert "eps=0" in caplog.text


@pytest.mark.parametrize("function", [by_trainer, by_trl])
def test_trainers_that_accumulate_gradients_are_fused(tmp_path: Path, function: Callable[..., Any]) -> None:
    points = [{**point, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2} for point in RATES]
    assert_as_alone(tmp_path, points, function, NEAR)


def shapes_in(job: Path) -> list[tuple[int, ...]]:
    """Return the shapes of the adapters in the checkpoint of a job, and of their optimizer's states."""
    (path,) = job.glob("step-*/state.pt")
    objects = torch.load(path, weights_only=True)["objects"]
    adapters = {name: value for name, value in objects["model"].items() if "lora" in name}
    leaves = tree_leaves([adapters, objects["optimizer"]])
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def test_a_checkpoint_has_the_true_shapes(tmp_path: Path) -> None:
    """A member of an array with others of higher ranks is resumed by itself, with the result of a whole run alone."""
    pytest.importorskip("peft")
    points = adapters(alpha=(4.0, 16.0, 64.0))
    together(tmp_path / "array", [{**point, "epochs": 1} for point in points], loop, seeds=range(3))
    for number, point in enumerate(points):
        name = str(number)
        alone(tmp_path / "alone", name, {**point, "epochs": 1}, loop, seed=number)
        shapes = shapes_in(tmp_path / "array" / name)
        assert shapes == shapes_in(tmp_path / "alone" / name)
        assert any(point["adapter"]["rank"] in shape for shape in shapes)
        resumed = alone(tmp_path / "array", name, {**point, "epochs": 2}, loop, seed=number)
        whole = alone(tmp_path / "whole", name, {**point, "epochs": 2}, loop, seed=number)
        assert distance(resumed["model"], whole["model"]) < NEAR
        assert distance(resumed["optimizer"], whole["optimizer"]) < NEAR


CHECKPOINTING = {"use_reentrant": False}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activation_checkpointing_is_exact(tmp_path: Path, dropout: float) -> None:
    """Dropout draws the same numbers again, of each member; ranks differ."""
    pytest.importorskip("peft")
    points = [{**point, "checkpointing": CHECKPOINTING} for point in adapters(dropout=dropout)]
    assert_as_alone(tmp_path, points, loop, NEAR)


@pytest.mark.parametrize("function", [by_trainer, by_trl])
def test_trainers_with_activation_checkpointing(tmp_path: Path, function: Callable[..., Any]) -> None:
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": CHECKPOINTING}
    assert_as_alone(tmp_path, [{**point, **options} for point in RATES], function, NEAR)


def test_reentrant_checkpointing_is_refused_with_what_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    points = [{**point, "checkpointing": {"use_reentrant": True}} for point in RATES]
    outcome = together(tmp_path, points, loop)
    assert outcome.engine.fused_steps == 0
    assert "reentrant activation checkpointing inside the model: write use_reentrant=False" in caplog.text


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the largest number in what pads rows and gradients, for each step."""
    noted: list[float] = []
    drop = Array.drop_gradients

    def noting(array: Array) -> None:
        noted.extend(_outside(array))
        drop(array)

    monkeypatch.setattr(Array, "drop_gradients", noting)
    return noted


def _outside(array: Array) -> Iterator[float]:
    for segment in array.segments:
        for number in range(len(segment.shapes)):
            for rows in (segment.rows, segment.gradients):
                if rows is None or not segment.is_padded(number):
                    continue
                whole = segment.stacked(rows, number).clone()
                for row, values in enumerate(whole):
                    within(values, segment.own_shapes[row][number]).zero_()
                yield float(whole.abs().max())
