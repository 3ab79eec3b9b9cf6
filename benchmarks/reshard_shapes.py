"""What moves when models of 7 to 70 billion parameters change their processes: bytes, rounds, memory, planning.

The models are Llamas on the meta device, sharded with FSDP2 over torch's ``fake`` backend; nothing is allocated or
sent. The tensors are the parameters in float32 and AdamW's two moments. The plan is that of a session, made for every
process: the table has its sums. Processes that join are between the others, or after them (`moved_if_last_gb`). A
node has four; `node_gb` is what the busiest one receives or sends. `planning_s` is the processor time of planning
in one process, the median.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _report import report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # the fake backend, and its only public place
from transformers import LlamaConfig, LlamaForCausalLM

from freetrain_parsl.extensions.sharding.rounds import Layout, rounds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

MODELS = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128_256,
    },
}  # fmt: skip
CHANGES = ((8, 12), (12, 8), (64, 65), (128, 96))
STATES = 3  # a parameter and two moments, all in its shape and type
PER_NODE = 4
BUDGET = 16 << 20


def layouts_of(name: str, processes: int) -> list[Layout]:
    """Shard a model on the meta device, and describe its state in the order in which it moves."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)  # type: ignore[no-untyped-call]
    try:
        mesh = init_device_mesh("cpu", (processes,))
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**MODELS[name]))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return [
            Layout(tuple(each.shape), each.dtype, each.placements[0].dim)
            for each in model.parameters()
            for _ in range(STATES)
        ]
    finally:
        dist.destroy_process_group()


def in_order(old: int, new: int) -> tuple[list[int], list[int]]:
    """Return the hosts of the old and new owners, with newcomers between the others, or leavers among them.

    The smaller group keeps its order; each of it has the place in the larger one that overlaps it most.
    """
    few, many = sorted((old, new))
    places = [round((2 * number + 1) * many / few / 2 - 0.5) for number in range(few)]
    others = iter(range(few, many))
    hosts = {place: host for host, place in enumerate(places)}
    larger = [hosts[place] if place in hosts else next(others) for place in range(many)]
    return (list(range(few)), larger) if new > old else (larger, list(range(few)))


def moved(
    layouts: Sequence[Layout], old_hosts: Sequence[int], new_hosts: Sequence[int], budget: int = BUDGET
) -> dict[str, Any]:
    """Plan a change on every process; return bytes that all receive and that the busiest node does, rounds, memory."""
    hosts = max(len(old_hosts), len(new_hosts))
    out, into, staging, rounds, seconds = [0] * hosts, [0] * hosts, 0, 0, []
    for host in range(hosts):
        began = time.process_time()
        plan = list(rounds_of(layouts, old_hosts, new_hosts, host, budget))
        seconds.append(time.process_time() - began)
        rounds = len(plan)
        for pieces in plan:
            sent = sum(each.size for each in pieces if new_hosts[each.target] != host)
            received = sum(each.size for each in pieces if old_hosts[each.source] != host)
            out[host], into[host], staging = out[host] + sent, into[host] + received, max(staging, sent + received)
    nodes = [slice(first, first + PER_NODE) for first in range(0, hosts, PER_NODE)]
    busiest = max(max(sum(out[node]), sum(into[node])) for node in nodes)
    return {"all": sum(into), "node": busiest, "rounds": rounds, "staging": staging, "planning": median(seconds)}


def row(name: str, layouts: Sequence[Layout], old: int, new: int) -> dict[str, Any]:
    """Plan a change with both orders of the processes."""
    state = sum(layout.column_bytes * layout.columns_per_index * layout.shape[layout.dim] for layout in layouts)
    between = moved(layouts, *in_order(old, new))
    last = moved(layouts, range(old), range(new), budget=1 << 60)  # in few slices: only bytes are counted
    return {
        "model": name,
        "change": f"{old} -> {new}",
        "state_gb": round(state / 1e9),
        "moved_gb": round(between["all"] / 1e9, 1),
        "moved_if_last_gb": round(last["all"] / 1e9, 1),
        "node_gb": round(between["node"] / 1e9, 1),
        "rounds": between["rounds"],
        "staging_mb": round(between["staging"] / 1e6, 1),
        "planning_s": round(between["planning"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    rows = []
    for name in options.models:
        for old, new in CHANGES:
            rows.append(row(name, layouts_of(name, old), old, new))
    report("What moves when large models change their processes", rows, ("torch", "transformers"), options.json)


if __name__ == "__main__":
    main()
