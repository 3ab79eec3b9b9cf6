"""Hugging Face training jobs, alone and in a session.

In a separate module because the processes of a crew import it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np
import torch
from disturbed import disturb
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from freetrain_parsl.extensions.integrations.huggingface import fit

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 75
WIDTH = 10


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Padded rows of tokens, to classify or to continue."""

    def __init__(self, samples: int, seed: int, *, language: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.language = language
        self.lengths = torch.randint(3, WIDTH + 1, (samples,), generator=generator)
        tokens = torch.randint(1, 50, (samples, WIDTH), generator=generator)
        self.mask = (torch.arange(WIDTH) < self.lengths[:, None]).long()
        self.tokens = tokens * self.mask

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        tokens, mask = self.tokens[position], self.mask[position]
        if self.language:
            labels = torch.where(mask.bool(), tokens, -100)
        else:
            labels = ((tokens > 25).sum() * 2 > mask.sum()).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def classifier() -> Any:
    torch.manual_seed(3)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def language_model() -> Any:
    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class InOrder(Trainer):
    """A Trainer with overridden methods: the dataset's order, a factor of the loss, a value in the logs."""

    def _get_train_sampler(self, *_args: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]  # it has a length

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * 1.5 if isinstance(loss, torch.Tensor) else (loss[0] * 1.5, *loss[1:])

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "own": 7.0}, *args, **kwargs)


class Counting(TrainerCallback):
    """Counts events, and keeps them over restarts."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.counts = {"evaluate": 0, "save": 0, "epochs": 0}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.counts["evaluate"] += 1

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.counts["save"] += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.counts["epochs"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.counts = list(state["steps"]), dict(state["counts"])


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(predictions.predictions, 1) == predictions.label_ids).mean())}


def arguments(root: Path, *, accumulate: int = 1, language: bool = False, **options: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(root),
        "per_device_train_batch_size": 16 // accumulate,
        "gradient_accumulation_steps": accumulate,
        "num_train_epochs": 3,
        "learning_rate": 5e-3,
        "warmup_steps": 4,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss" if language else "accuracy",
        "greater_is_better": not language,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    return TrainingArguments(**given)


def make(
    root: Path,
    *,
    language: bool = False,
    patience: int | None = None,
    dataset: Any = None,
    kind: Any = InOrder,
    **options: Any,
) -> Any:
    """Return a Trainer as a script would make it."""
    counting = Counting()
    trainer = kind(
        model=language_model() if language else classifier(),
        args=arguments(root, language=language, **options),
        train_dataset=Rows(SAMPLES, 0, language=language) if dataset is None else dataset,
        eval_dataset=Rows(40, 1, language=language),
        compute_metrics=None if language else accuracy,
        callbacks=[counting, *([EarlyStoppingCallback(patience)] if patience else [])],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.counting = counting
    return trainer


def summary(trainer: Any, output: Any) -> dict[str, Any]:
    """Return everything that two ways of training must agree on."""
    state = trainer.state
    return {
        "loss": output.training_loss,
        "steps": output.global_step,
        "log": state.log_history,
        "best": (state.best_metric, state.best_global_step),
        "called": trainer.counting.steps,
        "counts": trainer.counting.counts,
        "epoch": state.epoch,
        "weights": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
    }


def in_session(session: Any, **options: Any) -> dict[str, Any]:
    """Train in a session that may be disturbed; see `disturb`."""
    trainer = make(session.directory, **disturb(session, options))
    output = fit(session, trainer)
    return {**summary(trainer, output), "history": session.metrics["history"], "audit": session.audit}


def rows_of(name: str) -> Any:
    """Return a ``datasets.Dataset``: of lists, or of tokens for TRL."""
    from datasets import Dataset

    rows = Rows(SAMPLES, 0, language=name == "sft")
    columns = [rows[position] for position in range(SAMPLES)]
    if name == "sft":
        return Dataset.from_list(
            [{"input_ids": row["input_ids"][row["attention_mask"].bool()].tolist()} for row in columns]
        )
    return Dataset.from_list([{key: value.tolist() for key, value in row.items()} for row in columns])


def make_of(name: str, root: Path) -> Any:
    if name == "dataset":
        return make(root, dataset=rows_of(name))
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class InOrderSft(SFTTrainer):  # type: ignore[misc]  # untyped
        def _get_train_sampler(self, *_args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    words = Tokenizer(models.WordLevel({**{str(number): number for number in range(50)}}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0", eos_token="1")
    args = SFTConfig(
        output_dir=str(root),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=5e-3,
        logging_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
    )
    counting = Counting()
    trainer = InOrderSft(
        model=language_model(),
        args=args,
        train_dataset=rows_of(name),
        processing_class=tokenizer,
        callbacks=[counting],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.counting = counting
    return trainer


def plain_of(name: str, root: Path) -> dict[str, Any]:
    trainer = make_of(name, root)
    return summary(trainer, trainer.train())


def with_dataset(session: Any, **options: Any) -> dict[str, Any]:
    disturb(session, options)
    trainer = make_of("dataset", session.directory)
    return summary(trainer, fit(session, trainer))


def with_sft(session: Any, **options: Any) -> dict[str, Any]:
    disturb(session, options)
    trainer = make_of("sft", session.directory)
    return summary(trainer, fit(session, trainer))
