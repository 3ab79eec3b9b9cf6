"""Reader of lists of trainers in YAML or CSV that tracks the line of every value; curves of known networks by name."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput, UsageError, did_you_mean
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["KEYS", "MODELS", "Model", "numbered", "read_trainers"]

KEYS = ("name", "submit", "min", "max", "work", "curve", "rescale", "priority", "deadline", "count")
_REQUIRED = ("name", "max", "curve")


@dataclass(frozen=True)
class _Entry:
    """A trainer as written: key -> (line, value), and its first line."""

    file: Path
    line: int
    values: Mapping[str, tuple[int, Any]]

    def get(self, key: str, default: Any) -> Any:
        return self.values[key][1] if key in self.values else default

    def wrong(self, key: str, problem: str) -> InvalidInput:
        line = self.values[key][0] if key in self.values else self.line
        return InvalidInput(f"{self.file}:{line}: {problem}")

    def number(self, key: str, default: float, *, positive: bool = False) -> float:
        value = self.get(key, default)
        number = _float(value)
        if not math.isfinite(number) or number < 0 or (positive and number == 0):
            least = "a positive number" if positive else "zero or more"
            raise self.wrong(key, f"{key!r} must be {least}, got {value!r}")
        return number

    def count(self, key: str, default: int) -> int:
        number = self.number(key, default, positive=True)
        if number != int(number):
            raise self.wrong(key, f"{key!r} must be an integer, got {self.get(key, default)!r}")
        return int(number)


def read_trainers(
    path: Path, models: Mapping[str, Model], problem: Callable[[Trainer], str | None] | None = None
) -> tuple[Trainer, ...]:
    """Read a list of trainers.

    In YAML a list of mappings, in CSV a header and one line per trainer, with the keys

    - ``name``: unique;
    - ``submit``: seconds after the log's start (0);
    - ``min`` (1), ``max``: numbers of nodes;
    - ``work``: samples, or ``endless`` (the default);
    - ``curve``: a model's name, the file of a curve (relative to this one), or breakpoints: in YAML a mapping
      ``{1: 100, 2: 190}``, in CSV ``1:100;2:190``, nodes and samples per second; or a model or file for each kind of
      node, in YAML ``{gpu: resnet50, cpu: slow.csv}``, in CSV ``gpu:resnet50;cpu:slow.csv``;
    - ``rescale``: seconds lost at a change, ``{up: 18, down: 12, start: 10}`` or ``up:18;down:12;start:10``;
      missing ones are zero, and without this key a model's own costs are used;
    - ``priority`` (1); ``deadline``: seconds after the log's start (none);
    - ``count`` (1): number of such trainers, with numbered names.

    Parameters
    ----------
    path
        The list, ``.csv`` or YAML.
    models
        Models that a curve may refer to.
    problem
        Says why a trainer cannot be used, if it cannot; its message is raised with file and line.

    Raises
    ------
    InvalidInput
        The file cannot be read or contains something invalid; the message contains the line.
    """
    from freetrain_parsl.strict_yaml import read_text  # only a user's file needs YAML

    text = read_text(path, "list of trainers")
    entries = _read_csv(path, text) if path.suffix.lower() == ".csv" else _read_yaml(path, text)
    trainers: dict[str, Trainer] = {}
    for entry in entries:
        for trainer in _trainers(entry, models):
            if trainer.name in trainers:
                raise entry.wrong("name", f"a trainer {trainer.name!r} already exists; names must be unique")
            if problem is not None and (why := problem(trainer)) is not None:
                raise entry.wrong("name", f"trainer {trainer.name!r}: {why}")
            trainers[trainer.name] = trainer
    if not trainers:
        raise InvalidInput(f"{path}: contains no trainers; 'freetrain replay --example' writes a list to start from")
    return tuple(trainers.values())


def numbered(name: str, index: int, count: int) -> str:
    """Name one of several trainers, such as ``name-07``, with as many digits as needed for all."""
    return f"{name}-{index:0{len(str(count - 1))}d}"


def _trainers(entry: _Entry, models: Mapping[str, Model]) -> list[Trainer]:
    for key in entry.values:
        if key not in KEYS:
            raise entry.wrong(key, f"unknown key {key!r}{did_you_mean(key, KEYS)}; available: {', '.join(KEYS)}")
    for key in _REQUIRED:
        if key not in entry.values:
            raise entry.wrong(key, f"a trainer needs {key!r}")
    name, count = str(entry.get("name", "")), entry.count("count", 1)
    curves, costs = _curves(entry, models)
    curve = next(iter(curves.values()))
    curves.pop("", None)
    deadline = entry.number("deadline", 0.0) if "deadline" in entry.values else None
    endless = entry.get("work", "endless") == "endless"
    minimum, maximum = entry.count("min", 1), entry.count("max", 1)
    if minimum > maximum:
        raise entry.wrong("min", f"trainer {name!r}: min ({minimum}) is more than max ({maximum})")
    if (first := max(one.first_nodes for one in (curve, *curves.values()))) > minimum:
        problem = f"trainer {name!r}: its curve starts at {first} nodes, min is {minimum}"
        raise entry.wrong("curve", f"{problem}; add a point at or below {minimum} nodes, or raise min")
    costs = _costs(entry, costs)
    work = math.inf if endless else entry.number("work", 0.0, positive=True)
    priority, submit = entry.number("priority", 1.0, positive=True), entry.number("submit", 0.0)
    try:
        trainer = Trainer(name, minimum, maximum, curve, costs, work, priority, deadline, submit)
        if curves:
            trainer = replace(trainer, node_kinds=tuple(curves), curves=curves)
    except UsageError as error:
        raise entry.wrong("name", str(error)) from error
    if count == 1:
        return [trainer]
    return [replace(trainer, name=numbered(name, index, count)) for index in range(count)]


def _curves(entry: _Entry, models: Mapping[str, Model]) -> tuple[dict[str, ScalingCurve], CostsInSeconds]:
    """Return the curve of each kind of node, or the only one under an empty name, and the costs of a (first) model."""
    value = entry.get("curve", None)
    by_kind = _pairs(value) if isinstance(value, str) else value
    if not isinstance(by_kind, dict) or not by_kind or not all(_is_text(each) for each in by_kind.values()):
        curve, costs = _curve(entry, value, models)
        return {"": curve}, costs
    found = {str(kind): _curve(entry, each, models) for kind, each in by_kind.items()}
    return {kind: curve for kind, (curve, _) in found.items()}, next(iter(found.values()))[1]


def _curve(entry: _Entry, value: Any, models: Mapping[str, Model]) -> tuple[ScalingCurve, CostsInSeconds]:
    """Return the curve, and the costs that come with a model."""
    text = value
    if isinstance(value, str) and value.lower() in models:
        model = models[value.lower()]
        return model.curve, model.costs
    if isinstance(value, str) and Path(value).suffix.lower() in (".csv", ".yaml", ".yml"):
        return ScalingCurve.from_file(entry.file.parent / value), CostsInSeconds()
    if isinstance(value, str):
        value = _pairs(value)
    if not isinstance(value, dict):
        near = did_you_mean(str(text), tuple(models))
        raise entry.wrong(
            "curve", f"no curve {text!r}{near}; give a file, breakpoints, or a model of {', '.join(models)}"
        )
    try:
        points = {_whole(nodes): _float(rate) for nodes, rate in value.items()}
        return ScalingCurve(points), CostsInSeconds()
    except UsageError as error:
        raise entry.wrong("curve", str(error)) from error


def _costs(entry: _Entry, default: CostsInSeconds) -> CostsInSeconds:
    if "rescale" not in entry.values:
        return default
    value = entry.get("rescale", None)
    if isinstance(value, str):
        value = _pairs(value)
    if not isinstance(value, dict) or not set(value) <= {"up", "down", "start"}:
        raise entry.wrong(
            "rescale", f"'rescale' must give seconds for up, down and start, got {entry.get('rescale', '')!r}"
        )
    try:
        return CostsInSeconds(**{name: _float(seconds) for name, seconds in value.items()})
    except UsageError as error:
        raise entry.wrong("rescale", str(error)) from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and math.isnan(_float(value))


def _pairs(text: str) -> dict[str, str] | None:
    """Split ``1:100;2:190``; ``None`` if it has another form or a duplicate key."""
    pairs = [item.partition(":") for item in text.split(";") if item.strip()]
    split = {key.strip(): value.strip() for key, colon, value in pairs if colon}
    return split if split and len(split) == len(pairs) else None


def _whole(value: Any) -> Any:
    """Convert a string of digits to an integer; return anything else unchanged, for the curve to reject."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value


def _float(value: Any) -> float:
    """Convert a number or a string to a float (YAML reads ``1e8`` as a string); NaN for anything else."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _read_csv(file: Path, text: str) -> list[_Entry]:
    reader = csv.reader(text.splitlines())
    header: list[str] = []
    entries = []
    for row in reader:
        if not any(field.strip() for field in row) or row[0].lstrip().startswith("#"):
            continue
        fields = [field.strip() for field in row]
        if not header:
            header = [name.lower() for name in fields]
            if repeated := {name for name in header if header.count(name) > 1}:
                raise InvalidInput(f"{file}:{reader.line_num}: duplicate column {min(repeated)!r}")
            continue
        if len(fields) != len(header):
            raise InvalidInput(
                f"{file}:{reader.line_num}: expected {len(header)} fields as in the header, got {len(row)}"
            )
        line = reader.line_num
        entries.append(
            _Entry(file, line, {key: (line, value) for key, value in zip(header, fields, strict=True) if value})
        )
    return entries


def _read_yaml(file: Path, text: str) -> list[_Entry]:
    """Read entries from the node tree, which preserves lines and duplicate keys."""
    import yaml

    from freetrain_parsl.strict_yaml import compose

    root = compose(text, str(file))
    if root is None:
        return []
    if not isinstance(root, yaml.SequenceNode):
        raise InvalidInput(f"{file}:1: expected a list of trainers, each beginning with '- name: …'")
    entries = []
    for item in root.value:
        if not isinstance(item, yaml.MappingNode):
            raise InvalidInput(f"{file}:{item.start_mark.line + 1}: expected a trainer, such as '- name: a'")
        values: dict[str, tuple[int, Any]] = {}
        for key_node, value_node in item.value:
            line = key_node.start_mark.line + 1
            key = str(_plain(key_node, f"{file}:{line}"))
            if key in values:
                raise InvalidInput(f"{file}:{line}: duplicate key {key[:80]!r}")
            values[key] = (line, _plain(value_node, f"{file}:{line}"))
        entries.append(_Entry(file, item.start_mark.line + 1, values))
    return entries


def _plain(node: Any, where: str) -> Any:
    """Construct a scalar, or a mapping of scalars: a curve's points, or costs."""
    import yaml

    from freetrain_parsl.strict_yaml import construct

    if isinstance(node, yaml.ScalarNode):
        try:
            return construct(node.tag, node.value)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
    if isinstance(node, yaml.MappingNode) and all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
        plain = {_plain(key, where): _plain(value, where) for key, value in node.value}
        if len(plain) == len(node.value):
            return plain
        raise InvalidInput(f"{where}: duplicate key")
    raise InvalidInput(f"{where}: expected a value, or a mapping such as {{1: 100, 2: 190}}")


@dataclass(frozen=True)
class Model:
    """A neural network with measured scaling.

    Parameters
    ----------
    curve
        Samples per second as a function of the number of nodes.
    costs
        Its rescale costs.
    """

    curve: ScalingCurve
    costs: CostsInSeconds


def _summit(up: float, down: float, *rates: float) -> Model:
    """Make a model from its rates on 1, 2, 4, … nodes."""
    return Model(ScalingCurve([(1 << power, rate) for power, rate in enumerate(rates)]), CostsInSeconds(up, down))


MODELS: Mapping[str, Model] = {
    "alexnet": _summit(17.98, 12.005, 7115.3, 13071.7, 21066.1, 40484.9, 74002.9, 130762.0, 202135.4),
    "vgg16": _summit(17.98, 11.995, 1193.3, 2389.2, 4691.7, 9257.9, 18348.9, 36208.5, 70151.7),
    "resnet18": _summit(18.005, 11.995, 5218.8, 10582.5, 20436.0, 39584.0, 78023.8, 144762.5, 262723.0),
    "densenet": _summit(18.01, 12.0, 989.9, 1952.5, 3849.8, 7608.1, 14993.2, 28812.2, 57773.9),
    "mnasnet": _summit(17.995, 12.0, 3245.7, 6001.9, 11489.3, 23075.6, 43899.7, 83474.2, 160493.6),
    "shufflenet": _summit(17.975, 12.005, 2831.0, 5259.0, 9988.0, 20379.2, 38895.3, 74125.1, 145081.5),
    "mobilenet": _summit(18.01, 12.0, 3039.9, 5893.0, 11386.0, 22024.8, 42488.4, 82268.3, 155213.8),
}
"""ImageNet images per second on 1, 2, 4, … 64 nodes of Summit (six V100 each), and the seconds lost by growing and
shrinking: the middle of the range over the jobs of the data set. Source: BFTrainer/Replayer, the public data of the
BFTrainer paper, arXiv 2106.12091."""
