"""``@training_app``: its errors and their locations; running it is tested with the executor."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import ClassVar

import pytest
from parsl.dataflow.memoization import id_for_memo

from freetrain_parsl import ScalingCurve, TrainingApp, training_app
from freetrain_parsl.errors import InvalidApp, InvalidInput, InvalidSettings
from freetrain_parsl.executor.jobs.request import Fusion
from tests.recording_kernel import RecordingKernel


def train(session, lr=0.1):
    """Train something."""
    return session.metrics


def test_the_decorator_works_with_and_without_arguments() -> None:
    assert isinstance(training_app(train), TrainingApp)
    assert isinstance(training_app(max_nodes=4)(train), TrainingApp)


def test_an_app_looks_like_its_function() -> None:
    app = training_app(train)
    assert (app.__name__, app.__doc__, app.func) == ("train", "Train something.", train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_nodes": 4, "max_nodes": 2}, "max_nodes (2) is less than min_nodes (4)"),
        ({"min_nodes": 0}, "min_nodes must be a whole number of at least 1, got 0"),
        ({"min_nodes": "2"}, "min_nodes must be a whole number of at least 1, got '2'"),
        ({"max_nodes": float("nan")}, "max_nodes must be a whole number of at least 1, got nan"),
        ({"max_nodes": 10**9}, "max_nodes must be at most 1,000,000"),
        ({"scaling": {4: 10.0}, "min_nodes": 2, "max_nodes": 8}, "add a point at or below its least size, 2"),
        ({"scaling": [(2, 1.0), (1, 2.0)]}, "numbers of nodes must increase"),
        ({"scaling": {1: float("nan")}}, "scaling curve"),
        ({"rescale_costs": 2.0}, "rescale_costs must be RescaleCosts(up, down, start), got 2.0"),
        ({"priority": 0.0}, "priority must be positive"),
        ({"priority": "high"}, "priority must be a number, got 'high'"),
        ({"deadline": timedelta(0)}, "deadline must be positive"),
        ({"deadline": 60.0}, "deadline must be a datetime or a timedelta, got 60.0"),
        ({"deadline": datetime.fromisoformat("0001-01-01")}, "out of range"),
        ({"samples": 0}, "samples must be a whole number of at least 1, got 0"),
        ({"samples": 10**400}, "samples must be at most"),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 1, got 1.5"),
        ({"seed": 1.5}, "seed must be a whole number of at least 0, got 1.5"),
        ({"seed": None}, "seed must be a whole number of at least 0, got None"),
        ({"checkpoint_interval": 60}, "must be a timedelta, got 60; in seconds: timedelta(seconds=60)"),
        ({"name": ""}, "letters, digits"),
        ({"name": 5}, "letters, digits"),
        ({"name": "../escape"}, "letters, digits"),
        ({"name": "{rate}"}, "train: name '{rate}' cannot be filled; a name may use {lr}, {seed}"),
        ({"name": "{lr"}, "cannot be filled"),
        ({"fuse": True}, "fuse must be 'auto', False or a whole number of at least 2, got True"),
        ({"fuse": 1}, "fuse must be 'auto', False or a whole number of at least 2, got 1"),
        ({"fuse": None}, "fuse must be 'auto', False or a whole number of at least 2, got None"),
        ({"replicas": 0}, "replicas must be a whole number of at least 1, got 0"),
        ({"replicas": 2, "max_nodes": 1}, "replicas=2 of at least min_nodes=1 each need max_nodes=2 or more, got 1"),
        ({"replicas": 2, "max_nodes": 2, "snapshot_every": 5}, "cannot be combined with snapshot_every=5"),
        ({"snapshot_every": 0}, "snapshot_every is 0; it is 'auto', a number of steps of at least 1, or None"),
        ({"snapshot_every": True}, "snapshot_every is True; it is"),
        ({"snapshot_every": "never"}, "snapshot_every is 'never'; it is"),
        ({"nodes": 4}, "no option 'nodes'"),
        ({"executors": "label"}, "give a list of labels"),
    ],
)
def test_a_description_that_cannot_run_is_refused_at_decoration_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(InvalidApp) as caught:
        training_app(**options)(train)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def without_parameters(): ...
def without_session(lr=0.1): ...
def keyword_session(*, session): ...
def only_keywords(**options): ...
async def coroutine(session): ...
def generator(session):
    yield session


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_parameters, "has no parameter for the session: its first parameter is the session"),
        (without_session, "def without_session(session, lr=0.1)"),
        (keyword_session, "has no parameter for the session"),
        (only_keywords, "has no parameter for the session"),
        (coroutine, "generator or coroutine"),
        (generator, "generator or coroutine"),
    ],
)
def test_a_function_that_cannot_take_a_session_is_refused_at_decoration_in_one_line(function, message: str) -> None:
    with pytest.raises(InvalidApp) as caught:
        training_app(function)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [lambda s: s, lambda s, /, lr: s, lambda *everything: everything])
def test_the_session_may_have_any_name(function) -> None:
    assert training_app(function).func is function


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "train2(): missing a required argument: 'width'; the arguments after the session are: width, lr=0.1"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"rate": 0.2}, "unexpected keyword argument 'rate'"),
        ((1,), {"width": 2}, "multiple values for argument 'width'"),
        ((1,), {"session": None}, "the argument 'session' is the session, which is not passed"),
    ],
)
def test_arguments_that_the_function_does_not_take_are_a_type_error_at_the_call(args, kwargs, message: str) -> None:
    def train2(session, width, lr=0.1): ...

    with pytest.raises(TypeError) as caught:
        training_app(train2)(*args, **kwargs)
    assert message in str(caught.value)


def test_an_argument_may_have_any_name() -> None:
    @training_app
    def train(session, self): ...

    train.check_arguments(self=1)


def test_a_curve_file_that_is_missing_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(InvalidInput, match="nowhere"):
        training_app(scaling=tmp_path / "nowhere.csv")(train)


def test_options_change_one_call_and_leave_the_app_alone() -> None:
    app = training_app(max_nodes=4)(train)
    other = app.options(name="other", max_nodes=2)
    assert (other.request("x").max_nodes, app.request("x").max_nodes) == (2, 4)
    assert other.func is app.func


@pytest.mark.parametrize("changes", [{"min_nodes": 9}, {"speed": 1}])
def test_options_refuse_what_the_decorator_refuses(changes: dict) -> None:
    with pytest.raises(InvalidApp):
        training_app(max_nodes=4)(train).options(**changes)


OPTIONS = ("name", "seed", "epochs", "fuse", "max_nodes")


def called(function, *args, **given):
    """Return the request made by a call, with arguments and options."""
    kernel = RecordingKernel()
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    training_app(data_flow_kernel=kernel, **options)(function)(*args, **given)
    return kernel.requests[0]


def edited(session, lr=0.1):
    """Train something."""
    return lr * 2


edited.__name__ = edited.__qualname__ = "train"


def test_names_follow_from_function_arguments_and_seed_so_that_a_second_run_finds_its_checkpoints() -> None:
    name = called(train, lr=0.1).name
    assert name == called(train, lr=0.1).name
    assert re.fullmatch("train-[0-9a-f]{8}-[0-9a-f]{8}", name)
    others = [called(train, lr=0.2), called(train, 0.1), called(train, lr=0.1, seed=1)]
    assert len({name, *(other.name for other in others)}) == 4


def test_edited_code_has_another_name_that_tells_the_same_call() -> None:
    """A call of edited code starts over, and can find the checkpoints of the earlier code."""
    before, after = called(train, lr=0.1), called(edited, lr=0.1)
    assert before.name != after.name
    assert before.options.call == after.options.call
    assert after.name.startswith(f"{before.options.call}-")
    assert after.options.code.changes_since(before.options.code) != []


def test_a_name_of_ones_own_stays_and_the_code_is_told_beside_it() -> None:
    request = called(train, name="mine")
    assert (request.name, request.options.call) == ("mine", "")
    assert request.options.code == called(train, lr=0.1).options.code


def test_a_name_may_be_a_template_of_the_arguments_with_their_defaults_and_the_seed() -> None:
    request = called(train, name="lr{lr:.0e}-{seed}", seed=3)
    assert (request.name, request.options.call) == ("lr1e-01-3", "")
    assert called(train, 0.3, name="{lr}").name == "0.3"
    assert called(lambda s, **others: s, width=4, name="w{width}").name == "w4"


def test_a_template_that_a_call_cannot_fill_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidApp, match=r"train: name 'lr\{lr:.0e\}': 'fast' cannot be formatted with '.0e'"):
        called(train, "fast", name="lr{lr:.0e}")
    with pytest.raises(InvalidApp, match=r"name '\{width\}' cannot be filled; a name may use \{seed\}, \{lr\}"):
        called(lambda s, **others: s, lr=0.1, name="{width}")


def test_trainings_of_one_function_and_code_may_run_fused() -> None:
    one, other, after = called(train, lr=0.1), called(train, lr=0.2, seed=1, name="mine"), called(edited, lr=0.1)
    assert one.fusion == other.fusion != after.fusion
    assert one.fusion.limit is None
    assert called(train, fuse=4).fusion == Fusion(one.fusion.key, 4)
    assert called(train, fuse=False).fusion is None


def test_what_the_cache_of_parsl_keeps_is_the_result_of_a_seed_and_of_a_number_of_epochs() -> None:
    """`options` decide about the result as the arguments do."""
    requests = [called(train, name="t", **options) for options in ({}, {"seed": 1}, {"epochs": 2})]
    assert len({id_for_memo(request) for request in [*requests, called(edited, name="t")]}) == 4
    assert id_for_memo(requests[0]) == id_for_memo(called(train, name="t", max_nodes=4))


def test_what_to_do_on_a_change_of_code_is_one_of_three() -> None:
    assert training_app(train).request("t").options.on_code_change == "refuse"
    assert training_app(train).options(on_code_change="resume").request("t").options.on_code_change == "resume"
    with pytest.raises(InvalidApp, match="on_code_change is 'yes'; it is one of 'refuse', 'resume', 'restart'"):
        training_app(train).options(on_code_change="yes")


@pytest.mark.parametrize(("given", "steps"), [({}, 0), ({"snapshot_every": 7}, 7), ({"snapshot_every": None}, None)])
def test_copies_in_memory_are_made_by_cost_or_after_steps_or_not(given: dict, steps: int | None) -> None:
    assert training_app(**given)(train).request("t").options.snapshot_every == steps


def test_arguments_without_a_stable_identity_ask_for_a_name() -> None:
    with pytest.raises(InvalidApp, match=r"options\(name="):
        called(train, object())


def test_a_training_needs_a_freetrain_executor_in_the_config() -> None:
    class Kernel:
        executors: ClassVar = {"threads": object()}

    with pytest.raises(InvalidSettings, match="needs one FreeTrainExecutor in the loaded Config, found none"):
        training_app(train).executor_of(Kernel())


def test_a_curve_object_is_taken_as_it_is() -> None:
    curve = ScalingCurve({1: 1.0, 2: 1.9})
    assert training_app(scaling=curve, max_nodes=2)(train).request("x").scaling == curve
