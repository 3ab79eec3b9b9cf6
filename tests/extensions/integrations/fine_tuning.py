"""Fine-tuning of a small Llama in a plain loop, with Hugging Face's Trainer and with TRL's, as members of an array.

In a separate module because several tests use it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from freetrain_parsl.extensions.integrations.huggingface import fit

if TYPE_CHECKING:
    from collections.abc import Mapping

WORDS = 64
LAYERS = ("q_proj", "v_proj")


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sentences of random words, with labels."""

    def __init__(self, sentences: int = 16, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(3)
        self.words = torch.randint(2, WORDS, (sentences, length), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[position], "labels": self.words[position].clone()}


def llama(*, dtype: torch.dtype = torch.float64, use_cache: bool = False) -> Any:
    """Return a network with the same numbers each time, whatever the seed of the training job."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            use_cache=use_cache,
        )
        return LlamaForCausalLM(config).to(dtype)


def lora(*, rank: int = 4, alpha: float = 8.0, dropout: float = 0.0, **options: Any) -> Any:
    """Return adapters of PEFT; both matrices are drawn, so that each matters from the first step."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # any number
        lora_dropout=dropout,
        **{"target_modules": list(LAYERS), **options},
    )


def adapted(model: Any, **options: Any) -> Any:
    """Put adapters on a network."""
    from peft import get_peft_model

    dtype = next(model.parameters()).dtype
    return get_peft_model(model, lora(**options), autocast_adapter_dtype=False).to(dtype)


def digests_of_kinds() -> list[Any]:
    """Return the digests of adapters of which the first two, and the next two, can be in one array."""
    from freetrain_parsl.extensions.fusion.engine.array import MemberObjects

    of_ranks: tuple[dict[str, Any], ...] = {}, {"rank": 2, "alpha": 3.0, "use_rslora": True}
    points = *of_ranks, {"dropout": 0.1}, {"dropout": 0.2, "rank": 8}, {"use_dora": True}
    return [MemberObjects([adapted(llama(), **point)], []).structure(4) for point in points]


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


def loop(
    session: Any,
    *,
    lr: float = 1e-2,
    optimizer: str = "AdamW",
    options: Mapping[str, Any] = {},
    clip: float | None = None,
    adapter: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    use_cache: bool = False,
    length: int = 12,
    batch_size: int = 4,
    epochs: int = 2,
    checkpointing: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train in a plain loop."""
    model = llama(dtype=dtype, use_cache=use_cache)
    if adapter is not None:
        model = adapted(model, **adapter)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(checkpointing))
        model.enable_input_require_grads()
    parameters = [each for each in model.parameters() if each.requires_grad]
    made = getattr(torch.optim, optimizer)(parameters, lr=lr, **options)
    model, steps = session.prepare(model, made)
    model.train()
    batches = session.loader(Sentences(length=length), batch_size=batch_size)
    losses: list[float] = []
    for _ in session.epochs(epochs):
        for batch in batches:
            output = model(**batch)
            losses.append(output.loss.item())
            if clip is None:
                session.step(output.loss)
                continue
            session.backward(output.loss)
            torch.nn.utils.clip_grad_norm_(parameters, clip)
            session.step()
    return {
        "losses": losses,
        "model": trained(model),
        "optimizer": steps.state_dict()["state"],
        "cached": None if output.past_key_values is None else output.past_key_values.layers[0].keys.detach(),
        "draws": torch.rand(3),
    }


def _arguments(directory: Any, *, lr: float, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": lr,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 4,
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }


def by_trainer(
    session: Any, *, lr: float = 1e-2, adapter: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Train with Hugging Face's Trainer."""
    model = llama() if adapter is None else adapted(llama(), **adapter)
    arguments = TrainingArguments(**_arguments(session.directory, lr=lr, **options))
    trainer = Trainer(model, args=arguments, train_dataset=Sentences())
    fit(session, trainer)
    return {"model": trained(trainer.model)}


def by_accelerate(
    session: Any, *, lr: float = 1e-2, adapter: Mapping[str, Any] | None = None, clip: float = 0.5
) -> dict[str, Any]:
    """Train in a loop of Accelerate's."""
    from freetrain_parsl.extensions.integrations.accelerate import Accelerator

    accelerator = Accelerator(session)
    made = llama() if adapter is None else adapted(llama(), **adapter)
    parameters = [each for each in made.parameters() if each.requires_grad]
    model, optimizer, batches = accelerator.prepare(
        made, torch.optim.AdamW(parameters, lr=lr), DataLoader(Sentences(), batch_size=4)
    )
    for _ in accelerator.epochs(2):
        for batch in batches:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(parameters, clip)
            optimizer.step()
            optimizer.zero_grad()
    return {"model": trained(accelerator.unwrap_model(model))}


def _tokenizer() -> Any:
    """Return one whose words are numbers between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0", eos_token="1")


def by_trl(
    session: Any, *, lr: float = 1e-2, adapter: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Train with TRL's SFTTrainer."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    given = {"bf16": False, "gradient_checkpointing": False, "max_length": None, **options}
    trainer = SFTTrainer(
        model=llama() if adapter is None else adapted(llama(), **adapter),
        args=SFTConfig(**_arguments(session.directory, lr=lr, **given)),
        train_dataset=datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in Sentences().words]),
        processing_class=_tokenizer(),
    )
    fit(session, trainer)
    return {"model": trained(trainer.model)}


def by_dpo(
    session: Any,
    *,
    lr: float = 1e-2,
    adapter: Mapping[str, Any] | None = None,
    copies: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train with TRL's DPOTrainer: against another network; or, with an adapter, against the network without it.

    If TRL is given a network that has adapters already, it `copies` them, and the copy is the reference.
    """
    import datasets
    from trl import DPOConfig, DPOTrainer

    texts = [[str(word) for word in row] for row in Sentences().words.tolist()]
    parts = {"prompt": slice(0, 4), "chosen": slice(4, 8), "rejected": slice(8, 12)}
    rows = [{name: " " * (at.start > 0) + " ".join(text[at]) for name, at in parts.items()} for text in texts]
    given = {"bf16": False, "gradient_checkpointing": False, **options}
    trainer = DPOTrainer(
        model=adapted(llama(), **adapter) if adapter is not None and copies else llama(),
        ref_model=llama() if adapter is None else None,
        peft_config=lora(**adapter) if adapter is not None and not copies else None,
        args=DPOConfig(**_arguments(session.directory, lr=lr, **given)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=_tokenizer(),
    )
    fit(session, trainer)
    return {"model": trained(trainer.model)}
