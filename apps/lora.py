"""Fine-tuning with adapters of low rank (LoRA), by PEFT, on a Llama of ``transformers``: a base that stays as it is.

The base has random weights, unless ``pretrained`` names a model; the texts are synthetic. ``python apps/lora.py`` is
ordinary PyTorch in one process. `train` is the same training job for FreeTrain: a sweep over rates, seeds or weight
decays has the base in memory once per process, and in checkpoints once. Needs transformers and peft
(``pip install freetrain-parsl[huggingface,peft]``).
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from freetrain_parsl import training_app

if TYPE_CHECKING:
    from peft import PeftModel

    from freetrain_parsl.training.session import TrainingSession

WORDS = 96
"""Size of the vocabulary of a base with random weights."""


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Texts of one length, in which each word is followed by one of two others.

    Parameters
    ----------
    texts, length
        Number of texts, and words in a text.
    seed
        Seed of the texts; the language is always the same.
    """

    def __init__(self, texts: int, length: int, seed: int) -> None:
        followers = torch.randint(WORDS, (WORDS, 2), generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(WORDS, (texts, length), generator=generator)
        choices = torch.randint(2, (texts, length), generator=generator)
        for now in range(1, length):
            self.words[:, now] = followers[self.words[:, now - 1], choices[:, now]]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, text: int | slice) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[text], "labels": self.words[text]}


def adapted(pretrained: str, width: int, layers: int, length: int, rank: int, alpha: float) -> PeftModel:
    """Return a frozen base with adapters in all of its linear layers.

    The base is the same whatever the seed of the training job; the adapters are drawn with it.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if pretrained:
        base = AutoModelForCausalLM.from_pretrained(pretrained, use_cache=False)
    else:
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length, use_cache=False,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            base = LlamaForCausalLM(config)
    return get_peft_model(
        base, LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def trained(model: PeftModel) -> list[torch.nn.Parameter]:
    """Return the parameters of the adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def perplexity(model: PeftModel, texts: Texts) -> float:
    """Return between how many words the model is undecided, on average."""
    model.eval()
    with torch.no_grad():
        batch = {name: value.to(model.device) for name, value in texts[:].items()}
        loss = model(**batch).loss.item()
    model.train()
    return math.exp(loss)


@training_app(max_nodes=1)
def train(
    session: TrainingSession, *, epochs: int = 4, batch_size: int = 4, lr: float = 1e-2, weight_decay: float = 0.0,
    rank: int = 8, alpha: float = 16.0, pretrained: str = "", width: int = 64, layers: int = 2, length: int = 16,
    samples: int = 256,
) -> dict[str, Any]:  # fmt: skip
    """Train on the idle nodes of a cluster, together with the other training jobs of a sweep."""
    texts, validation = Texts(samples, length, 1), Texts(64, length, 2)
    model = adapted(pretrained, width, layers, length, rank, alpha)
    optimizer = AdamW(trained(model), lr=lr, weight_decay=weight_decay)
    model, optimizer = session.prepare(model, optimizer)
    data = session.loader(texts, batch_size)
    for _epoch in session.epochs(epochs):
        for batch in data:
            session.backward(model(**batch).loss)
            clip_grad_norm_(trained(model), 1.0)
            session.step()
        session.log(perplexity=perplexity(model, validation))
    return session.metrics


def main() -> None:
    """Train in this process, without FreeTrain."""
    parser = argparse.ArgumentParser(description="Train adapters of low rank in plain PyTorch.")
    for name, value in train.func.__kwdefaults__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts, validation = Texts(options.samples, options.length, 1), Texts(64, options.length, 2)
    shape = (options.width, options.layers, options.length)
    model = adapted(options.pretrained, *shape, options.rank, options.alpha).to(device)
    optimizer = AdamW(trained(model), lr=options.lr, weight_decay=options.weight_decay)
    for epoch in range(options.epochs):
        for batch in DataLoader(texts, options.batch_size, shuffle=True):
            loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(trained(model), 1.0)
            optimizer.step()
        print(f"epoch {epoch:2d}  loss {loss.item():.3f}  perplexity {perplexity(model, validation):.2f}")


if __name__ == "__main__":
    main()
