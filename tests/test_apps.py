"""The example apps run as plain PyTorch and as FreeTrain training jobs, and learn."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from freetrain_parsl.training.fragment import run_local

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use one core: such small steps only get slower with threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


APPS = Path(__file__).parents[1] / "apps"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, APPS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def training(name: str) -> Any:
    """Return the training function, decorated or not."""
    train = load(name).train
    return getattr(train, "func", train)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("digits", ["--epochs", "1", "--width", "8"]),
        ("char_lm", ["--epochs", "1", "--characters", "10000"]),
        ("hf_style", ["--epochs", "1", "--samples", "200"]),
        ("llm", ["--epochs", "1", "--windows", "64", "--width", "16"]),
        ("lora", ["--epochs", "1", "--samples", "32"]),
    ],
)
def test_each_app_runs_alone_without_freetrain(name: str, options: list[str]) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(APPS / f"{name}.py"), *options], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.startswith("epoch  0  loss ")


def test_digits_are_learnt(tmp_path: Path) -> None:
    metrics = run_local(training("digits"), epochs=3, width=12, directory=tmp_path)
    assert metrics["history"][-1]["accuracy"] > 0.9
    assert metrics["samples"] == 3 * 1500


def test_the_text_becomes_less_surprising(tmp_path: Path) -> None:
    metrics = run_local(training("char_lm"), epochs=2, characters=30_000, width=32, directory=tmp_path)
    first, last = (row["bits_per_character"] for row in metrics["history"])
    assert last < first < 7


def test_a_hugging_face_style_model_is_trained(tmp_path: Path) -> None:
    metrics = run_local(training("hf_style"), epochs=2, samples=1000, directory=tmp_path)
    assert metrics["history"][-1]["accuracy"] > 0.75  # half of the labels could be guessed
    assert metrics["samples"] == 2 * 1000


def test_a_sharded_llama_learns_which_words_follow(tmp_path: Path) -> None:
    metrics = run_local(training("llm"), epochs=3, windows=256, width=48, layers=2, context=32, directory=tmp_path)
    first, *_, last = (row["perplexity"] for row in metrics["history"])
    assert last < 25 < first  # of 96 words


def test_adapters_on_a_frozen_base_learn_which_words_follow(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    metrics = run_local(training("lora"), epochs=3, directory=tmp_path)
    first, *_, last = (row["perplexity"] for row in metrics["history"])
    assert last < 60  # of 96 words
    assert last < first
