"""A small transformer and the habits of its users, for jobs that change their processes; imported by the crew."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from freetrain_parsl.extensions.sharding import narrowing

narrowing._LEAST = 0  # these models are small, and their shards are to stay in their place as those of large ones do

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, SAMPLES = 23, 10, 2, 6, 12, 120

EXACT = 1e-12 if torch.__version__ >= "2.9" else 1e-7
"""Greatest difference in float64: clip_grad_norm_ of torch 2.8 adds its 1e-6 to the norm of each process's part."""


@dataclass(frozen=True)
class Case:
    """What a user does."""

    dtype: torch.dtype = torch.float64
    reshard: Any = None
    reduced: bool = False  # MixedPrecisionPolicy(bf16)
    offload: bool = False
    columns: bool = False  # some parameters are sharded on dimension 1
    grouped: bool = False  # fully_shard([norm, frozen])
    checkpointing: str = ""  # of activations: "wrapper" or "function"
    meta: bool = False  # newcomers build on the meta device
    two_optimizers: bool = False
    ema: bool = False
    in_loop: bool = False  # averages in session.state: an object, a dictionary and a tensor
    micro_batch: int | None = None
    inner: int = 14
    compiled: bool = False
    width: int = WIDTH


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.width
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, case.inner), nn.Linear(case.inner, width)
        self.gain = nn.Parameter(torch.ones(1))  # smaller than the number of processes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.gain * self.down(nn.functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, case.width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(2))
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.frozen = nn.Linear(case.width, case.width)
        self.frozen.requires_grad_(requires_grad=False)
        self.small = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(()))
        self._function = case.checkpointing == "function"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.small.sum() * self.scale.to(self.small.dtype)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self._function else block(x)
        return self.head(self.norm(x + 0.1 * self.frozen(x)))


class Ema:
    """An average of sharded parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self._average[name].lerp_(p.detach(), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._average)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average = dict(state)


class Tokens:
    """Seeded sequences; stateless."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self._all = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> torch.Tensor:
        return self._all[position]


def build(session: Any, case: Case, *, shard: bool = True) -> nn.Module:
    """Return the model, as a user's function makes it."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    joins = session.rank == -1
    on_meta = case.meta and joins
    with torch.device("meta" if on_meta else "cpu"):
        model = Model(case).to(case.dtype)
    if case.checkpointing == "wrapper":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    if not shard:
        return model.to(session.device)
    mesh = session.mesh
    options: dict[str, Any] = {"mesh": mesh}
    if case.reshard is not None:
        options["reshard_after_forward"] = case.reshard
    if case.reduced:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        columns = {block.down.weight} if case.columns else set()
        fully_shard(block, **options, shard_placement_fn=lambda p, c=columns: Shard(1) if p in c else None)
        if case.compiled:
            block.compile(backend="aot_eager")
    if case.grouped:
        fully_shard([model.norm, model.frozen], **options)
    fully_shard(model, **options)
    if on_meta:
        model.to_empty(device=session.device)
    return model


def optimizers_of(trained: list[nn.Parameter], case: Case) -> list[torch.optim.Optimizer]:
    if not case.two_optimizers:
        return [torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    return [
        torch.optim.AdamW(matrices, lr=1e-2, weight_decay=0.1, foreach=False),
        torch.optim.SGD(others, lr=1e-2, momentum=0.9),
    ]


def train_case(  # noqa: C901 - one option for each thing that users do
    session: Any,
    *,
    case: Case,
    shard: bool = True,
    epochs: int = 2,
    gates: dict[int, Path] | None = None,
    pause_after: int | None = None,
    dies: tuple[str, tuple[int, ...]] | None = None,
) -> dict[str, Any]:
    """Train; return the history, all whole tensors, and whether everything stayed the same object."""
    if dies is not None and session.rank in dies[1]:
        die_at(dies[0])
    model = build(session, case, shard=shard)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = optimizers_of(trained, case)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: min(1, (step + 1) / 10) * 0.97**step)
    ema = [Ema(model)] if case.ema else []
    session.prepare(model, *optimizers, scheduler, *ema)
    kept = None
    if case.in_loop:
        kept = session.state(
            ema=Ema(model),
            slow={name: p.detach().clone() for name, p in model.named_parameters()},
            last=deque([trained[0].detach().clone() for _ in range(2)], maxlen=2),
        )
    same = list(map(id, model.parameters()))
    hooked: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: hooked.append("forward"))
    data = session.loader(Tokens(), BATCH, micro_batch=case.micro_batch)
    steps = 0
    for epoch in session.epochs(epochs):
        for tokens in data:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), tokens[:, 1:].flatten()
            )
            session.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if not session.step():
                continue
            steps += 1
            scheduler.step()
            for average in ema:
                average.update(model)
            if kept is not None:
                kept.ema.update(model)
                for name, p in model.named_parameters():
                    kept.slow[name].lerp_(p.detach(), 0.1)
                kept.last.append(kept.last[-1] * 0.5 + trained[0].detach())
            step = session.metrics["steps"]
            if step % 3 == 0:  # a validation: leaves an unsharded root behind
                with torch.no_grad():
                    model(Tokens()[0][None, :-1].to(session.device))
            if gates and (gate := gates.get(step)):
                gate.with_suffix(f".{session.rank}").touch()
                while not gate.exists():
                    time.sleep(0.002)
            if step == pause_after and session.rank == 0:
                import training_crew

                training_crew.NOTICE.pause_requested.set()
        session.log(epoch_done=epoch)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    states = {f"{n}": o.state_dict()["state"] for n, o in enumerate(optimizers)}
    return {
        "history": session.metrics["history"],
        "model": whole(model.state_dict()),
        "states": whole(states),
        "ema": whole(ema[0].state_dict()) if ema else None,
        "kept": kept and [whole(kept.ema.state_dict()), whole(kept.slow), [whole(each) for each in kept.last]],
        "same": same == list(map(id, model.parameters())) and len(hooked) >= steps,
        "largest": largest_shard(model),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def die_at(point: str) -> None:
    """Let this process be killed at a point of its next change."""
    from freetrain_parsl.extensions.sharding import resharding, structures

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    allocate, read, calls = resharding._NewShards.allocate, resharding._NewShards.read, []
    commit = resharding.Resharding._commit
    hand_over = resharding.Resharding.hand_over

    def killed_at_fifth(call: Any, *arguments: Any) -> Any:
        calls.append(1)
        return killed() if len(calls) == 5 else call(*arguments)

    def killed_after(*arguments: Any) -> None:
        commit(*arguments)
        killed()

    def killed_after_giving(*arguments: Any) -> None:
        hand_over(*arguments)
        killed()

    match point:
        case "before the move":
            resharding.move = killed
        case "in the move":
            resharding._NewShards.allocate = partialmethod_of(killed_at_fifth, allocate)  # type: ignore[method-assign]
            resharding._NewShards.read = partialmethod_of(killed_at_fifth, read)  # type: ignore[method-assign]
        case "after the move":
            resharding._NewShards.filled = killed  # type: ignore[method-assign]
        case "after all have moved":
            resharding.Resharding._commit = killed  # type: ignore[method-assign]
        case "after its commit":
            resharding.Resharding._commit = killed_after  # type: ignore[method-assign]
        case "after it has given its part away":
            resharding.Resharding.hand_over = killed_after_giving  # type: ignore[method-assign]
        case "after the drop":
            structures.forget_meshes = killed
        case _:
            raise AssertionError(point)


def partialmethod_of(function: Any, first: Any) -> Any:
    return lambda *arguments: function(first, *arguments)


def largest_shard(model: nn.Module) -> float:
    """Return the part of the model's elements that this process has."""
    mine = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return mine / sum(p.numel() for p in model.parameters())


def whole(value: Any) -> Any:
    """Return a nested state with whole tensors."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()
    return value
