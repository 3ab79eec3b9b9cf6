"""BatchNorm in training needs two samples at a time: how batches are divided for it, and what no division can mend."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.training.data.order import Order

__all__ = ["divisible_for"]

logger = logging.getLogger(__name__)

_LEAST = 2  # samples, on which a mean and a variance can be computed


def divisible_for(objects: Iterable[object], order: Order) -> Order:
    """Return an order in which each piece has enough samples for the models; log a warning if a whole batch has not."""
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    norms = [layer for model in models for layer in model.modules() if isinstance(layer, _BatchNorm)]
    if not norms:
        return order
    kind = next((type(layer).__name__ for layer in norms if isinstance(layer, nn.BatchNorm1d)), None)
    single = order.batch_size == 1 or order.samples % order.batch_size == 1
    if kind is not None and single and not order.scaled and order.batch_range is None:
        # Not an error: with a length, or in evaluation mode, it normalizes a single sample.
        logger.warning(
            "%s has one sample (%d samples in batches of %d), on which %s fails in training, as in plain PyTorch, "
            "unless its input has a length; use session.loader(…, %s",
            "a batch" if order.batch_size == 1 else "the last batch of an epoch",
            order.samples,
            order.batch_size,
            kind,
            "batch_size=…) with a larger batch" if order.batch_size == 1 else "drop_last=True)",
        )
    return replace(order, least=_LEAST)
