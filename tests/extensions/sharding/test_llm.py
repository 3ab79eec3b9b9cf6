"""The example app ``llm.py``: a sharded Llama on changing processes has the results of plain PyTorch in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from llm_trainings import SMALL, app, float64, train_llm

from freetrain_parsl.training.fragment import Finished, Paused

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = pytest.mark.slow

WINDOWS = SMALL["windows"]
STEPS_AN_EPOCH = -(-WINDOWS // SMALL["batch_size"])


def plain(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the perplexities after each epoch of the app's own loop, in this process."""
    llm, found = app(), []
    perplexity = llm.perplexity
    monkeypatch.setattr(llm, "perplexity", lambda *given: found.append(perplexity(*given)) or found[-1])
    monkeypatch.setattr("sys.argv", ["llm.py", *(f"--{name.replace('_', '-')}={n}" for name, n in SMALL.items())])
    torch.manual_seed(0)
    with float64():
        llm.main()
    return found


def assert_as_plain(end: Finished, expected: list[float]) -> None:
    assert [row["perplexity"] for row in end.value["history"]] == pytest.approx(expected, rel=1e-5)
    assert end.value["steps"] == SMALL["epochs"] * STEPS_AN_EPOCH
    assert (end.progress.samples_lost, end.progress.duplicate_samples) == (0, 0)


def ends(outcomes: list[Any]) -> list[Any]:
    assert all(outcome and not outcome.error for outcome in outcomes), outcomes
    return [outcome.end for outcome in outcomes]


def test_a_llama_that_is_resumed_on_2_3_and_1_processes_ends_as_in_plain_pytorch(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded, with accumulation, clipping, a schedule, recomputed activations, and texts of uneven lengths."""
    expected = plain(monkeypatch)
    for size, pause_after in ((2, 2), (3, 5)):
        paused = ends(crew.run(size, tmp_path, train_llm, pause_after=pause_after))
        assert [(type(end), end.progress.step) for end in paused] == [(Paused, pause_after)] * size
    assert_as_plain(ends(crew.run(1, tmp_path, train_llm))[0], expected)


def test_a_llama_whose_processes_change_in_place_ends_as_in_plain_pytorch(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 -> 3 -> 1 -> 2, in the middle of epochs and after a validation; nothing is resumed."""
    expected = plain(monkeypatch)
    gates = {step: tmp_path / f"gate-{step}" for step in (2, 3, 7)}
    run = crew.start(2, tmp_path / "run", train_llm, gates=gates)
    for size, gate in zip((3, 1, 2), gates.values(), strict=True):
        run.regroup(size, release=gate.touch)
    for end in ends(run.outcomes()):
        assert end.progress.in_place
        assert end.progress.resumed_from is None
        assert_as_plain(end, expected)


def test_all_words_of_a_text_but_the_first_can_be_predicted() -> None:
    texts = app().PackedTexts(windows=50, context=16, seed=3)
    batch = texts[:]
    assert torch.equal(batch["labels"] == -100, batch["position_ids"] == 0)
    followers = {}
    for window in range(50):
        for now in range(1, 16):
            if batch["position_ids"][window, now]:
                word, follower = batch["input_ids"][window, now - 1 : now + 1].tolist()
                followers.setdefault(word, set()).add(follower)
    assert max(map(len, followers.values())) <= 4
