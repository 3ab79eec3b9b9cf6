"""Training jobs for a GPU; in a separate module because the processes of the crew import it."""

from __future__ import annotations

from typing import Any

import torch
import training_crew
from torch.nn.functional import cross_entropy
from training_crew import Data


def classify_in_half_precision(session: Any, *, epochs: int = 3) -> dict[str, Any]:
    """Train with float16 and a GradScaler; return its scale and the model's device."""
    model, _, scaler = session.prepare(training_crew.net(), torch.optim.SGD, torch.amp.GradScaler("cuda"), lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(epochs):
        for x, y in data:
            with torch.autocast("cuda", torch.float16):
                loss = cross_entropy(model(x), y)
            session.step(loss)
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"parameters": parameters.cpu(), "scale": scaler.get_scale(), "device": parameters.device.type}
