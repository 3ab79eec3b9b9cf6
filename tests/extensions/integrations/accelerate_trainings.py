"""A script for Accelerate, alone and in a session.

In a separate module because the processes of a crew import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from disturbed import disturb
from hf_trainings import SAMPLES, Rows, classifier
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from freetrain_parsl.extensions.integrations.accelerate import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SAMPLES_USED = SAMPLES - SAMPLES % 4  # so that all micro-batches are equal: accelerate averages means otherwise


def script(accelerator: Any, epochs: Callable[[int], Iterable[int]], *, accumulate: int = 1) -> dict[str, Any]:
    """Train and validate, as accelerate's example nlp_example.py does."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = torch.utils.data.Subset(Rows(SAMPLES, 0, language=False), range(SAMPLES_USED))
    train_dataloader = DataLoader(rows, batch_size=12 // accumulate, shuffle=False)
    eval_dataloader = DataLoader(Rows(40, 1, language=False), batch_size=32)
    steps = len(train_dataloader) * 3 // accumulate
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accuracies = []
    for epoch in epochs(3):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += int((predictions == references).sum())
        accelerator.log({"accuracy": right / 40, "rate": lr_scheduler.get_last_lr()[0]}, step=epoch)
        accuracies.append(right / 40)
    weights = accelerator.unwrap_model(model).state_dict()
    return {"weights": {name: value.detach().clone() for name, value in weights.items()}, "accuracies": accuracies}


def in_session(session: Any, **options: Any) -> dict[str, Any]:
    """Run the script in a session that may be disturbed."""
    options = disturb(session, options)
    settings = {"mixed_precision": options.pop("mixed_precision", "no")}
    accelerator = Accelerator(session, gradient_accumulation_steps=options.get("accumulate", 1), **settings)
    value = script(accelerator, accelerator.epochs, **options)
    return {**value, "steps": session.metrics["steps"], "history": session.metrics["history"], "audit": session.audit}
