"""Neural networks with measured scaling, by name: the curves of the built-in trainers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MODELS", "Model"]


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
