"""A language model that does not have to fit on one device: a Llama, sharded with FSDP2.

The model is a Llama of ``transformers``, untrained; the texts are synthetic, packed into windows of one length.
``python apps/llm.py`` is ordinary PyTorch in one process. `train` is the same training job for FreeTrain, sharded over
its processes. Needs transformers (``pip install freetrain-parsl[huggingface]``).
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from freetrain_parsl import training_app

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import LlamaForCausalLM

    from freetrain_parsl.training.session import TrainingSession

WORDS = 96
"""Size of the vocabulary."""


class PackedTexts(Dataset[dict[str, torch.Tensor]]):
    """Windows of short texts, one after the other; each word is followed by one of four others, some more often.

    Parameters
    ----------
    windows, context
        Number of windows, and words in a window.
    seed
        Seed of the texts; the language is always the same.
    """

    def __init__(self, windows: int, context: int, seed: int) -> None:
        followers = torch.randint(WORDS, (WORDS, 4), generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(WORDS, (windows, context), generator=generator)
        self.begins = torch.rand(windows, context, generator=generator) < 2 / context  # where a text begins
        self.begins[:, 0] = True
        self.places = torch.zeros_like(self.words)  # in the text
        choices = (4 * torch.rand(windows, context, generator=generator) ** 3).long()
        for now in range(1, context):
            follows = ~self.begins[:, now]
            self.words[follows, now] = followers[self.words[follows, now - 1], choices[follows, now]]
            self.places[follows, now] = self.places[follows, now - 1] + 1

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, window: int | slice) -> dict[str, torch.Tensor]:
        """Return words, places, by which the model separates the texts, and labels: -100 where a text begins."""
        words = self.words[window]
        labels = words.masked_fill(self.begins[window], -100)
        return {"input_ids": words, "position_ids": self.places[window], "labels": labels}


def llama(width: int, layers: int, context: int) -> LlamaForCausalLM:
    """Return a Llama with random weights that computes its activations again in the backward pass."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=context, use_cache=False,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def shard(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """Shard each layer, then the rest of the model; on GPUs, compute in bfloat16 and sum gradients in float32."""
    computed_in = torch.bfloat16 if mesh.device_type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=computed_in, reduce_dtype=torch.float32 if computed_in else None)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def steered(model: LlamaForCausalLM, lr: float, steps: int) -> tuple[AdamW, LambdaLR]:
    """Return an optimizer and a learning rate that rises over a tenth of the steps and falls as a cosine."""
    optimizer = AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    rises = max(1, steps // 10)
    schedule = LambdaLR(optimizer, lambda n: min((n + 1) / rises, 0.55 + 0.45 * math.cos(math.pi * min(n / steps, 1))))
    return optimizer, schedule


def perplexity(model: LlamaForCausalLM, texts: PackedTexts) -> float:
    """Return between how many words the model is undecided, on average; called on all processes, as it is sharded."""
    model.eval()
    loss, count = 0.0, int((~texts.begins[:, 1:]).sum())
    with torch.no_grad():
        for begin in range(0, len(texts), 64):
            batch = {name: value.to(model.device) for name, value in texts[begin : begin + 64].items()}
            loss += model(**batch, num_items_in_batch=count).loss.item()
    model.train()
    return math.exp(loss)


@training_app(max_nodes=4)
def train(
    session: TrainingSession, *, epochs: int = 4, batch_size: int = 32, micro_batch: int = 8, lr: float = 5e-3,
    width: int = 64, layers: int = 4, context: int = 64, windows: int = 1024,
) -> dict[str, Any]:  # fmt: skip
    """Train on the idle nodes of a cluster: on any number of nodes, in any number of fragments."""
    texts, validation = PackedTexts(windows, context, 1), PackedTexts(128, context, 2)
    model = llama(width, layers, context)
    shard(model, session.mesh)
    optimizer, schedule = steered(model, lr, epochs * -(-windows // batch_size))
    model, optimizer, schedule = session.prepare(model, optimizer, schedule)
    data = session.loader(texts, batch_size, micro_batch=micro_batch)
    for _epoch in session.epochs(epochs):
        for batch in data:
            if session.backward(model(**batch).loss):
                clip_grad_norm_(model.parameters(), 1.0)
            session.step()
            schedule.step()
        session.log(perplexity=perplexity(model, validation))
    return session.metrics


def main() -> None:
    """Train in this process, without FreeTrain and without shards."""
    parser = argparse.ArgumentParser(description="Train a Llama in plain PyTorch.")
    for name, value in train.func.__kwdefaults__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts, validation = PackedTexts(options.windows, options.context, 1), PackedTexts(128, options.context, 2)
    model = llama(options.width, options.layers, options.context).to(device)
    optimizer, schedule = steered(model, options.lr, options.epochs * -(-options.windows // options.batch_size))
    data = DataLoader(texts, options.batch_size, shuffle=True)
    for epoch in range(options.epochs):
        for batch in data:
            total, count = 0.0, (batch["labels"][:, 1:] >= 0).sum()
            for begin in range(0, len(batch["labels"]), options.micro_batch):
                part = {name: value[begin : begin + options.micro_batch].to(device) for name, value in batch.items()}
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    loss = model(**part, num_items_in_batch=count).loss
                loss.backward()
                total += loss.item()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print(f"epoch {epoch:2d}  loss {total:.3f}  perplexity {perplexity(model, validation):.2f}")


if __name__ == "__main__":
    main()
