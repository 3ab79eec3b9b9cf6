"""Reader of lists of trainers in YAML or CSV that tracks the line of every value; curves of known networks by name."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from freetrain_parsl.campaign.files.yaml_file import Section, Variables
from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.strict_yaml import compose, construct, read_text, resolve_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MODELS", "Model", "numbered", "read_trainers"]


def read_trainers(
    path: Path, models: Mapping[str, Model], problem: Callable[[PlannedJob], str | None] | None = None
) -> tuple[PlannedJob, ...]:
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
    text = read_text(path, "list of trainers")
    rows = _read_csv(path, text) if path.suffix.lower() == ".csv" else _read_yaml(path, text)
    trainers: dict[str, PlannedJob] = {}
    for row in rows:
        section = Section(str(path), "", row, row.start_mark.line + 1, Variables({}, {}))
        for trainer in _trainers(section, path.parent, models):
            if trainer.name in trainers:
                raise section.refusal(f"a trainer {trainer.name!r} already exists; names must be unique", "name")
            if problem is not None and (why := problem(trainer)) is not None:
                raise section.refusal(f"trainer {trainer.name!r}: {why}")
            trainers[trainer.name] = trainer
    if not trainers:
        raise InvalidInput(f"{path}: contains no trainers; 'freetrain replay --example' writes a list to start from")
    return tuple(trainers.values())


def numbered(name: str, index: int, count: int) -> str:
    """Name one of several trainers, such as ``name-07``, with as many digits as needed for all."""
    return f"{name}-{index:0{len(str(count - 1))}d}"


def _trainers(section: Section, directory: Path, models: Mapping[str, Model]) -> list[PlannedJob]:
    name, count = section.required("name", "a"), section.count("count") or 1
    minimum, maximum = section.count("min") or 1, section.count("max")
    if maximum is None:
        raise section.refusal("is missing; give it like 'max: 4'", "max")
    if minimum > maximum:
        raise section.refusal(f"trainer {name!r}: min ({minimum}) is more than max ({maximum})", "min")
    curves, costs = _curves(section, directory, models)
    curve = next(iter(curves.values()))
    if (first := max(one.first_nodes for one in curves.values())) > minimum:
        problem = f"trainer {name!r}: its curve starts at {first} nodes, min is {minimum}"
        raise section.refusal(f"{problem}; add a point at or below {minimum} nodes, or raise min", "curve")
    curves.pop("", None)
    costs = _costs(section, costs)
    work = section.number("work", positive=True) if section.text("work") not in (None, "endless") else None
    priority, submit = section.number("priority", positive=True), section.number("submit", least=0)
    trainer = section.checked(
        PlannedJob,
        name,
        minimum,
        maximum,
        curve,
        costs,
        math.inf if work is None else work,
        1.0 if priority is None else priority,
        section.number("deadline", least=0),
        submit or 0.0,
        key="name",
    )
    section.done()
    if curves:
        trainer = section.checked(replace, trainer, node_kinds=tuple(curves), curves=curves, key="curve")
    if count == 1:
        return [trainer]
    return [replace(trainer, name=numbered(name, index, count)) for index in range(count)]


def _curves(
    section: Section, directory: Path, models: Mapping[str, Model]
) -> tuple[dict[str, ScalingCurve], CostsInSeconds]:
    """Return the curve of each kind of node, or the only one under an empty name, and the costs of a (first) model."""
    value = section.value("curve")
    if value is None:
        raise section.refusal("is missing; give it like 'curve: {1: 100, 2: 190}'", "curve")
    by_kind = _pairs(value)
    if not isinstance(by_kind, dict) or not by_kind or not all(isinstance(each, str) for each in by_kind.values()):
        curve, costs = _curve(section, value, directory, models)
        return {"": curve}, costs
    found = {str(kind): _curve(section, each, directory, models) for kind, each in by_kind.items()}
    return {kind: curve for kind, (curve, _) in found.items()}, next(iter(found.values()))[1]


def _curve(
    section: Section, value: Any, directory: Path, models: Mapping[str, Model]
) -> tuple[ScalingCurve, CostsInSeconds]:
    """Return the curve, and the costs that come with a model."""
    if isinstance(value, str) and value.lower() in models:
        model = models[value.lower()]
        return model.curve, model.costs
    if isinstance(value, str) and Path(value).suffix.lower() in (".csv", ".yaml", ".yml"):
        return ScalingCurve.from_file(directory / value), CostsInSeconds()
    points = _pairs(value)
    if not isinstance(points, dict):
        near = did_you_mean(str(value), tuple(models))
        raise section.refusal(
            f"no curve {value!r}{near}; give a file, breakpoints, or a model of {', '.join(models)}", "curve"
        )
    return section.checked(ScalingCurve, points, key="curve"), CostsInSeconds()


def _costs(section: Section, default: CostsInSeconds) -> CostsInSeconds:
    value = section.value("rescale")
    seconds = _pairs(value)
    if value is None:
        return default
    if not isinstance(seconds, dict) or not set(seconds) <= {"up", "down", "start"}:
        raise section.refusal(f"must give seconds for up, down and start, got {value!r}", "rescale")
    return section.checked(CostsInSeconds, **seconds, key="rescale")


def _pairs(value: Any) -> Any:
    """Split a text such as ``1:100;2:190``; return anything else, and a text of another form, as it is."""
    if not isinstance(value, str):
        return value
    pairs = [[part.strip() for part in item.split(":")] for item in value.split(";") if item.strip()]
    if not all(len(pair) == 2 for pair in pairs) or len({pair[0] for pair in pairs}) != len(pairs):
        return value
    return {_scalar(key): _scalar(text) for key, text in pairs}


def _scalar(text: str) -> Any:
    return construct(resolve_tag(text), text)


def _read_csv(file: Path, text: str) -> list[yaml.MappingNode]:
    """Read rows as YAML has them."""
    reader = csv.reader(text.splitlines())
    header: list[str] = []
    rows = []
    for row in reader:
        if not any(field.strip() for field in row) or row[0].lstrip().startswith("#"):
            continue
        if header and len(row) != len(header):
            raise InvalidInput(
                f"{file}:{reader.line_num}: expected {len(header)} fields as in the header, got {len(row)}"
            )
        mark = yaml.Mark(str(file), 0, reader.line_num - 1, 0, "", 0)
        nodes = [yaml.ScalarNode(resolve_tag(field.strip()), field.strip(), mark) for field in row]
        if header:
            keys = [yaml.ScalarNode("", key, mark) for key in header]
            rows.append(yaml.MappingNode("", list(zip(keys, nodes, strict=True)), mark))
        else:
            header = [node.value.lower() for node in nodes]
    return rows


def _read_yaml(file: Path, text: str) -> list[yaml.MappingNode]:
    root = compose(text, str(file))
    if root is None:
        return []
    if not isinstance(root, yaml.SequenceNode):
        raise InvalidInput(f"{file}:1: expected a list of trainers, each beginning with '- name: …'")
    for item in root.value:
        if not isinstance(item, yaml.MappingNode):
            raise InvalidInput(f"{file}:{item.start_mark.line + 1}: expected a trainer, such as '- name: a'")
    return list(root.value)


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
