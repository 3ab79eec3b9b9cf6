"""A training's code is told from other code, not from the same at another place."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

from freetrain_parsl.training.identity import code_identity


def compiled(source: str) -> Any:
    names: dict[str, Any] = {"__name__": "app"}
    exec(source, names)
    return names["train"]


def test_the_name_is_readable() -> None:
    assert code_identity(compiled("def train(session): pass")).startswith("app:train#")


def test_place_and_comments_do_not_count() -> None:
    one = compiled("def train(session):\n    return {1, 2, 3} & set(session)")
    other = compiled("\n\n# new\ndef train(session):\n    # better\n    return {1, 2, 3} & set(session)")
    assert code_identity(one) == code_identity(other)


def test_a_changed_constant_name_or_inner_function_counts() -> None:
    sources = [
        "def train(session): return 0.1",
        "def train(session): return 0.2",
        "def train(session): return session.a",
        "def train(session): return session.b",
        "def train(session): return lambda x: x + 1",
        "def train(session): return lambda x: x + 2",
    ]
    assert len({code_identity(compiled(source)) for source in sources}) == len(sources)


def test_wrappers_are_looked_through() -> None:
    def train(session: Any) -> None:
        """Do nothing."""

    @functools.wraps(train)
    def wrapper(session: Any) -> None:
        train(session)

    assert code_identity(wrapper) == code_identity(train)


def test_callables_without_code_of_their_own_have_a_name() -> None:
    class Training:
        def __call__(self, session: Any) -> None:
            """Do nothing."""

    assert "Training" in code_identity(Training())
    assert "#" not in code_identity(print)


def test_it_is_the_same_in_another_process() -> None:
    """Sets have another order there."""
    script = (
        "from freetrain_parsl.training.identity import code_identity\n"
        "def train(x): return x in {'a', 'b', 'c', 'd', 'e'}\n"
        "print(code_identity(train))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
