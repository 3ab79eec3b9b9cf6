"""Sweeps of LoRA adapters on one frozen base, fused in one process: time of a step and memory, against one job alone.

Use ``--quick`` for one small shape, ``--json FILE`` to save the figures, and ``--end-to-end`` for a sweep of eight jobs
on the embedded cluster instead (see ``_lora_sweep.py``). The models are of transformers, with random weights, and
PEFT's adapters of rank 8 on their attention; each member has its own seed, data order and rate. *Ratio* is the
processor time of a step alone over that of a member's step in the array, each the shortest of all steps of several
rounds, in which three ways alternate in one process; *in turns* is the same for members that are not fused. *Way* is
what ``fuse="auto"`` chooses, *auto* its ratio: 1 if members train apart. The command fails if one is below .95.
*Memory* is in MiB: `alone`, `peak` and `peak_in_turns` are what a process with one training job, and with the array,
needs at its peak beyond its imports; `stacked` and `shared` are the distinct bytes of the parameters and buffers of all
members, without and with a shared base. `base` and `adapter` are those of one member. Needs transformers and peft.

``--gpu``: larger models in bfloat16 on a GPU, ``--gpu 256x1x8`` for one row (tokens, sequences, members). There the
time is that on the clock, with all kernels done, and memory is what torch has allocated on the GPU at its peak; *apart*
compares with as many processes that train at the same time, one job each, and adds up their memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import _lora_sweep
import torch
from _at_once import at_once
from _report import report
from peft import LoraConfig, get_peft_model
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox, Member
from freetrain_parsl.extensions.fusion.slot.run import run_members
from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.training.checkpoints import copy_on_write
from freetrain_parsl.training.fragment import run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Membership

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS = 512
STEPS = 13
SKIPPED = 3  # steps, which allocate memory and verify
TIME_TO_START = 120.0  # seconds until all processes of one device have begun
MIB = 2**20


class Shape(NamedTuple):
    """What is trained: `members` training jobs, each on `sequences` of `tokens` a step."""

    model: str
    hidden: int
    layers: int
    sequences: int
    tokens: int
    members: int


SHAPES = [
    Shape("llama", 512, 4, 1, 16, 8),
    Shape("llama", 256, 4, 1, 16, 8),
    Shape("llama", 256, 4, 1, 64, 8),
    Shape("llama", 256, 4, 4, 64, 8),
    Shape("llama", 256, 4, 16, 64, 8),
    Shape("gpt2", 256, 4, 1, 64, 8),
    Shape("llama", 512, 8, 1, 16, 8),
    Shape("llama", 512, 8, 4, 64, 8),
]
LEAST_RATIO = 0.95  # of what is chosen
TURNS = "measured as well"
QUICK = [Shape("llama", 64, 2, 1, 16, 4)]
ON_GPU = ["256x1x8", "1024x1x8", "256x4x8", "1024x4x8", "256x1x16", "1024x1x16"]
LARGE = 1024  # hidden: a model for a GPU

made: list[torch.nn.Module] = []
"""The models of the array that runs."""


def adapted(shape: Shape) -> torch.nn.Module:
    """Return a base, the same for all seeds, with adapters."""
    config: Any
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        if shape.hidden >= LARGE:
            config = LlamaConfig(
                vocab_size=32000, hidden_size=shape.hidden, intermediate_size=8 * shape.hidden // 3, use_cache=False,
                num_hidden_layers=shape.layers, num_attention_heads=shape.hidden // 128, num_key_value_heads=4,
            )  # fmt: skip
            with torch.device("cuda"):
                base, targets = LlamaForCausalLM(config).to(torch.bfloat16), ["q_proj", "v_proj"]
        elif shape.model == "llama":
            config = LlamaConfig(
                vocab_size=WORDS, hidden_size=shape.hidden, intermediate_size=2 * shape.hidden, use_cache=False,
                num_hidden_layers=shape.layers, num_attention_heads=4, num_key_value_heads=2,
            )  # fmt: skip
            base, targets = LlamaForCausalLM(config), ["q_proj", "v_proj"]
        else:
            config = GPT2Config(
                vocab_size=WORDS, n_embd=shape.hidden, n_layer=shape.layers, n_head=4, use_cache=False,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
            base, targets = GPT2LMHeadModel(config), ["c_attn"]
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))


def train(session: Any, shape: Shape, lr: float, steps: int, lap: Callable[[], None] | None) -> None:
    """Fine-tune for some steps; `lap` is called before each."""
    model = adapted(shape)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=lr)
    model, optimizer = session.prepare(model, optimizer)
    made.append(model)
    ids = torch.randint(WORDS, (2 * shape.sequences * steps, shape.tokens), generator=torch.Generator().manual_seed(3))
    data = session.loader(TensorDataset(ids), batch_size=shape.sequences)
    done = 0
    for _ in session.epochs(1 << 20):
        for (batch,) in data:
            if lap is not None:
                lap()
            if done == steps:
                return
            session.step(model(input_ids=batch, labels=batch).loss)
            done += 1


def seconds() -> float:
    """Return the processor time, or on a GPU the time at which it has done all its work."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Laps:
    """The shortest time between two calls, in seconds, without the first ones."""

    def __init__(self) -> None:
        self.shortest = math.inf
        self._calls = 0
        self._last = 0.0

    def __call__(self) -> None:
        """Note the time since the last call."""
        now = seconds()
        if self._calls > SKIPPED:
            self.shortest = min(self.shortest, now - self._last)
        self._calls += 1
        self._last = seconds()


def alone(shape: Shape, lap: Callable[[], None] | None = None) -> None:
    """Train one job by itself."""
    with tempfile.TemporaryDirectory() as root:
        run_fragment(
            train, args=(shape, 1e-3, STEPS, lap), options=SessionOptions("alone", Path(root)),
            membership=Membership("alone"), meet=lambda _: None, mailbox=ControlMailbox(), report=lambda _: None,
        )  # fmt: skip
    made.clear()


def together(shape: Shape, lap: Callable[[], None] | None = None, sizing: ArraySizing | None = None) -> str:
    """Train an array, and return why it was not fused; `lap` is called in each step of all."""
    decides = sizing is not None and not sizing.decided
    steps = 1000 if decides else STEPS
    ends: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:

        def job(number: int) -> Member:
            first = lap if number == 0 or decides else None
            point = (train, (shape, 1e-3 * (number + 1), steps, first), {})
            return Member(SessionOptions(str(number), Path(root), seed=number), lambda: point)

        members = [job(number) for number in range(shape.members)]
        engine = run_members(
            members, ArrayMailbox(), report=lambda *_: None, ended=ends.__setitem__, sizing=sizing,
        )  # fmt: skip
    for end in ends.values():
        if isinstance(end, BaseException) and not isinstance(end, Decided):
            raise end
    made.clear()
    return engine.reason


def apart(shape: Shape) -> tuple[float, float]:
    """Train all members at the same time, each in a process; return the seconds of a step of all, and their MiB."""
    times, sizes = zip(*at_once(shape.members, _one_apart, shape), strict=True)
    return max(times), sum(sizes)


def _one_apart(shape: Shape, ready: Any, found: Any) -> None:
    torch.set_num_threads(1)
    times: list[float] = []

    def lap() -> None:
        if len(times) == SKIPPED:
            ready.wait(TIME_TO_START)
        seconds()
        times.append(time.perf_counter())

    alone(shape, lap)
    found.put(((times[-1] - times[SKIPPED]) / (len(times) - 1 - SKIPPED), torch.cuda.max_memory_allocated() / MIB))


class Decided(Exception):
    """The sizing has decided."""


def in_turns(shape: Shape, lap: Callable[[], None] | None = None) -> None:
    """Train an array whose members step in turns."""
    together(shape, lap, ArraySizing(shape.members, shape.members, turns=TURNS))


def chosen(shape: Shape) -> str:
    """Return how ``fuse="auto"`` trains: ``fused``, ``in turns`` or ``apart``."""
    sizing = ArraySizing(shape.members)

    def lap() -> None:
        if sizing.decided:
            raise Decided

    together(shape, lap, sizing)
    return "fused" if sizing.fused else "in turns" if sizing.turns else "apart"


def distinct() -> float:
    """Return the bytes of the parameters and buffers of all models, each place once."""
    tensors = [tensor for model in made for tensor in [*model.parameters(), *model.buffers()]]
    places = {copy_on_write.address_of(tensor): tensor.nbytes for tensor in tensors}
    return sum(places.values()) / MIB


def resident(field: str) -> float:
    """Return how much of this process is in memory, in MiB: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


class Peak:
    """Notes what the models have in memory at a step in the middle."""

    def __init__(self) -> None:
        self.models = 0.0
        self._calls = 0

    def __call__(self) -> None:
        """Measure, if it is this step."""
        self._calls += 1
        if self._calls == STEPS // 2:
            self.models = distinct()


def measure_memory(shape: Shape, way: str) -> dict[str, float]:
    """Measure in this process, which has done nothing yet."""
    if way == "stacked":
        copy_on_write._lazy_clone = None  # noqa: SLF001 - as in a torch without it
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = resident("VmRSS")
    peak = Peak()
    if way == "alone":
        alone(shape, peak)
    elif way == "in turns":
        in_turns(shape, peak)
    elif reason := together(shape, peak):
        raise SystemExit(f"not fused: {reason}")
    at_peak = resident("VmHWM")
    parameters = list(adapted(shape).parameters())
    return {
        "peak": at_peak - before,
        "models": peak.models,
        "base": sum(each.nbytes for each in parameters if not each.requires_grad) / MIB,
        "adapter": sum(each.nbytes for each in parameters if each.requires_grad) / MIB,
    }


def memory(shape: Shape, way: str) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--memory", json.dumps([*shape]), way]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def row(shape: Shape, turns: int) -> dict[str, Any]:
    """Measure time and memory of a shape."""
    one, all_together, one_by_one = Laps(), Laps(), Laps()
    for _ in range(turns):
        alone(shape, one)
        if reason := together(shape, all_together):
            raise SystemExit(f"{shape}: not fused: {reason}")
        in_turns(shape, one_by_one)
    fused, turned = (one.shortest * shape.members / laps.shortest for laps in (all_together, one_by_one))
    way = chosen(shape)
    found = {way: memory(shape, way) for way in ("alone", "stacked", "shared", "in turns")}
    return {
        **shape._asdict(),
        "ms_alone": one.shortest * 1e3,
        "ratio": fused,
        "in_turns": turned,
        "way": way,
        "auto": {"fused": fused, "in turns": turned, "apart": 1.0}[way],
        "memory_mb": {
            "base": found["alone"]["base"],
            "adapter": found["alone"]["adapter"],
            "alone": found["alone"]["peak"],
            "stacked": found["stacked"]["models"],
            "shared": found["shared"]["models"],
            "peak": found["shared"]["peak"],
            "peak_stacked": found["stacked"]["peak"],
            "peak_in_turns": found["in turns"]["peak"],
        },
    }


def row_on_gpu(shape: Shape) -> dict[str, Any]:
    """Measure time and memory of a shape on a GPU."""
    laps, peaks = {}, {}
    reason = ""
    for way in ("alone", "together"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        laps[way] = Laps()
        if way == "alone":
            alone(shape, laps[way])
        else:
            reason = together(shape, laps[way])
        peaks[way] = torch.cuda.max_memory_allocated() / MIB
    torch.cuda.empty_cache()
    step_apart, memory_apart = apart(shape)
    return {
        **shape._asdict(),
        "ms_alone": laps["alone"].shortest * 1e3,
        "ratio": laps["alone"].shortest * shape.members / laps["together"].shortest,
        "apart": step_apart / laps["together"].shortest,
        "not_fused": reason,
        "alone_mb": peaks["alone"],
        "peak_mb": peaks["together"],
        "apart_mb": memory_apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gpu", nargs="*", metavar="TOKENSxSEQUENCESxMEMBERS")
    parser.add_argument("--end-to-end", action="store_true", help="a sweep on the embedded cluster")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    if given.gpu is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a session uses a GPU wherever there is one
    torch.set_num_threads(1)
    if given.memory:
        shape, way = given.memory
        print(json.dumps(measure_memory(Shape(*json.loads(shape)), way)))
        return
    if given.gpu is not None:
        rows = []
        for each in given.gpu or ON_GPU:
            tokens, sequences, members = map(int, each.split("x"))
            rows.append(row_on_gpu(Shape("llama", 1536, 16, sequences, tokens, members)))
            print(json.dumps(rows[-1]), flush=True)
        title = f"Sweeps of adapters on one base, {torch.cuda.get_device_name()}"
        report(title, rows, ["torch", "transformers", "peft", "freetrain-parsl"], given.json)
        return
    if given.end_to_end:
        sweep = _lora_sweep.measure(quick=given.quick)
        report(
            "A sweep of adapters, end to end", sweep, ["torch", "transformers", "peft", "freetrain-parsl"], given.json
        )
        return
    rows = [row(shape, given.turns) for shape in (QUICK if given.quick else SHAPES)]
    flat = [{**{key: value for key, value in each.items() if key != "memory_mb"}, **each["memory_mb"]} for each in rows]
    report("Sweeps of adapters on one base", flat, ["torch", "transformers", "peft", "freetrain-parsl"])
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if slow := [each for each in rows if each["auto"] < LEAST_RATIO]:
        raise SystemExit(f"chosen although slower than one by one: {slow}")


if __name__ == "__main__":
    main()
