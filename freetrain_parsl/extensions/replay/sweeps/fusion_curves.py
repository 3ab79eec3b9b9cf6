"""Fusion curves by name: published ones of HFTA, and measured ones of this package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings, did_you_mean
from freetrain_parsl.extensions.fusion.curve import FusionCurve

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FUSION_CURVES", "fusion_curve"]

FUSION_CURVES: Mapping[str, FusionCurve] = {
    "none": FusionCurve(),
    # HFTA (Wang et al., MLSys 2021), README of github.com/UofT-EcoSystem/hfta: MobileNet-V2, CIFAR-10, one V100 with
    # mixed precision; an epoch takes 6.02 s alone and 7.65 s for three fused models (means of epochs 2 to 5).
    "hfta-mobilenet": FusionCurve([(3, 2.36)]),
    # benchmarks/fusion.py, sessions, Adam: one H100 with batches of 64, and one core of a CPU with batches of 16.
    "h100-mlp": FusionCurve([(16, 2.5)]),
    "h100-cnn": FusionCurve([(16, 2.7)]),
    "h100-pointnet": FusionCurve([(16, 4.1)]),
    "h100-transformer": FusionCurve([(16, 3.4)]),
    "h100-lstm": FusionCurve([(16, 1.8)]),
    "cpu-mlp": FusionCurve([(16, 2.9)]),
    "cpu-cnn": FusionCurve([(16, 1.6)]),
    "cpu-transformer": FusionCurve([(16, 1.3)]),
}
"""Name -> curve. Only one size of each was published or recorded; between it and one member, values are linear."""


def fusion_curve(spec: str) -> FusionCurve:
    """Return the curve of a name in `FUSION_CURVES`, or read one from a file.

    Raises
    ------
    InvalidSettings
        It is neither a name nor the path of a file of curves.
    InvalidInput
        The file is invalid; see `FusionCurve.from_file`.
    """
    if spec in FUSION_CURVES:
        return FUSION_CURVES[spec]
    if Path(spec).suffix.lower() not in (".csv", ".json"):
        known = ", ".join(FUSION_CURVES)
        near = did_you_mean(spec, tuple(FUSION_CURVES))
        raise InvalidSettings(f"--fusion: unknown {spec!r}{near}; give a .csv or .json file, or one of {known}")
    return FusionCurve.from_file(spec)
