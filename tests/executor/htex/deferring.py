"""A process that has deferred torch's compiler runs each statement of its arguments in a fork, and says what it left.

With ``--plain`` as the first argument, the compiler has been imported as usual. Prints a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import torch

from freetrain_parsl.executor.htex.deferred_compiler import defer_compiler

if sys.argv[1] == "--plain":
    import torch._dynamo
else:
    defer_compiler()
    assert "torch._dynamo.eval_frame" not in sys.modules

torch.manual_seed(0)
net = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
batch = torch.arange(6.0).reshape(2, 3)
found: dict[str, Any] = {}


def step() -> Any:
    """Make a step."""
    loss = net(batch).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled() -> None:
    """Note the losses of compiled steps, and what the compiler says of them."""
    fast = torch.compile(step, backend="eager")
    found["losses"] = [fast().item() for _ in range(3)]
    counters: Any = __import__("torch._dynamo.utils", fromlist=["counters"]).counters
    found["graphs"] = dict(counters["stats"])
    found["breaks"] = len(counters["graph_break"])


class WithoutHash:
    """A function of a kind that cannot be a key."""

    def __call__(self) -> None:
        """Do nothing."""

    __hash__: Any = None


def break_with(statement: str) -> None:
    """Break a compiled function with what has been imported before the compiler was."""
    exec(statement, globals())
    graph_break = globals()["graph_break"]

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        graph_break()
        return x * 2

    assert torch.compile(broken, backend="eager")(torch.ones(1)).item() == 4
    counters: Any = __import__("torch._dynamo.utils", fromlist=["counters"]).counters
    assert counters["stats"]["unique_graphs"] == 2
    assert len(counters["graph_break"]) == 1


def interrupted() -> None:
    """Interrupt the import, and use the compiler later."""

    class Interrupting:
        """Interrupts the import of one submodule."""

        def find_spec(self, name: str, *_: Any) -> None:
            """Find nothing."""
            if name == "torch._dynamo.convert_frame":
                sys.meta_path.remove(self)
                raise KeyboardInterrupt

    sys.meta_path.insert(0, Interrupting())
    try:
        torch._dynamo.reset()
    except KeyboardInterrupt:
        step()
        torch.compiler.reset()
    else:
        raise AssertionError


def look_for_submodule() -> None:
    """Look for a submodule, without an import of it, before it is imported."""
    import importlib.util

    assert importlib.util.find_spec("torch._dynamo.eval_frame").origin.endswith("eval_frame.py")
    from torch._dynamo.eval_frame import OptimizedModule

    found["same"] = isinstance(torch.compile(net, backend="eager"), OptimizedModule)


def together() -> None:
    """Import it in several threads at once."""
    failed: list[BaseException] = []

    def load() -> None:
        try:
            import torch._dynamo.eval_frame

            torch.optim.SGD([torch.ones(1)], lr=0.1).step()
            torch._dynamo.reset()
        except BaseException as error:  # noqa: BLE001 - reported
            failed.append(error)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["failed"] = [repr(error) for error in failed]


def train_as_usual() -> None:
    """Do what many training functions do."""
    import copy
    import pickle

    import torch.distributed as dist
    from torch.func import functional_call, vmap
    from torch.utils.data import DataLoader, TensorDataset

    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        other = kind(net.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(other, 1)
        step()
        other.step()
        other.load_state_dict(copy.deepcopy(other.state_dict()))
        pickle.loads(pickle.dumps(other))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(batch)
    dist.destroy_process_group()
    vmap(lambda row: functional_call(net, dict(net.named_parameters()), (row,)))(batch)
    list(DataLoader(TensorDataset(batch), 2))
    [getattr(module, "__warningregistry__", None) for module in list(sys.modules.values())]


def main(statements: list[str]) -> None:
    """Run the statements."""
    step()
    for statement in statements:
        if os.fork() == 0:
            exec(statement, globals())
            modules = [module for name, module in sys.modules.items() if name.startswith("torch._dynamo.")]
            found["loaded"] = bool(modules)
            found["loaders"] = sorted({type(module.__spec__.loader).__name__ for module in modules if module.__spec__})
            if modules:
                import torch._dynamo.eval_frame as submodule

                module = sys.modules["torch._dynamo"]
                assert submodule is module.eval_frame is sys.modules["torch._dynamo.eval_frame"]
                assert torch._dynamo is module
                assert "has not been used" not in module.__doc__
                assert module.OptimizedModule is submodule.OptimizedModule
                kept = getattr(torch.optim.Optimizer.add_param_group.__wrapped__, "__dynamo_disable")
                found["disabled"] = hasattr(kept, "_torchdynamo_disable")
            print(json.dumps(found), flush=True)
            os._exit(0)
        _, status = os.wait()
        assert status == 0, statement


if __name__ == "__main__":
    main([argument for argument in sys.argv[1:] if argument != "--plain"])
