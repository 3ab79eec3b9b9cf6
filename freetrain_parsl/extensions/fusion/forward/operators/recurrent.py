"""Recurrent networks: `torch.vmap` knows none of them. Each time step is one batched product for all members.

Packed sequences and projections run row by row, and so does an LSTM where torch has a fast kernel for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.extensions.fusion.forward.operators.layers import linear_rows
from freetrain_parsl.extensions.fusion.forward.operators.randomness import dropout_of_rows, is_ordinary_dropout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from freetrain_parsl.extensions.fusion.forward.operators.mode import FusedOperators, Rule

# What a time step computes: (gates of the input, gates of the state, states) -> new states; the first is the output.
Cell = Any

Stacks = tuple[torch.Tensor, ...]

_PADDED_ARGUMENTS = 9  # those of the form for packed sequences begin with data and batch sizes, and lack `batch_first`


def _lstm(from_input: torch.Tensor, from_state: torch.Tensor, states: Stacks) -> Stacks:
    entry, forget, update, exit_ = (from_input + from_state).chunk(4, -1)
    memory = torch.sigmoid(forget) * states[1] + torch.sigmoid(entry) * torch.tanh(update)
    return torch.sigmoid(exit_) * torch.tanh(memory), memory


def _gru(from_input: torch.Tensor, from_state: torch.Tensor, states: Stacks) -> Stacks:
    reset, update, new = from_input.chunk(3, -1)
    own_reset, own_update, own_new = from_state.chunk(3, -1)
    candidate = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
    return ((states[0] - candidate) * torch.sigmoid(update + own_update) + candidate,)


def _tanh(from_input: torch.Tensor, from_state: torch.Tensor, states: Stacks) -> Stacks:
    return (torch.tanh(from_input + from_state),)


def _relu(from_input: torch.Tensor, from_state: torch.Tensor, states: Stacks) -> Stacks:
    return (torch.relu(from_input + from_state),)


def _cell_rule(cell: Cell) -> Rule:
    def rule(
        fused: FusedOperators,
        func: Any,
        input: torch.Tensor,
        hx: Any,
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        b_ih: torch.Tensor | None = None,
        b_hh: torch.Tensor | None = None,
    ) -> Any:
        states = hx if isinstance(hx, (tuple, list)) else (hx,)
        tensors = (input, *states, w_ih, w_hh, b_ih, b_hh)
        if not any(map(fused.is_stacked, tensors)):
            return NotImplemented
        values, *own_states = (fused.rows(tensor) for tensor in (input, *states))
        input_weight, state_weight = fused.rows(w_ih), fused.rows(w_hh)
        input_bias, state_bias = (None if bias is None else fused.rows(bias) for bias in (b_ih, b_hh))
        with fused.level.suspended():
            from_input = linear_rows(values, input_weight, input_bias)
            new = cell(from_input, linear_rows(own_states[0], state_weight, state_bias), tuple(own_states))
        return tuple(map(fused.wrap, new)) if isinstance(hx, (tuple, list)) else fused.wrap(new[0])

    return rule


def _network_rule(cell: Cell) -> Rule:
    def rule(fused: FusedOperators, func: Any, *args: Any) -> Any:
        if len(args) != _PADDED_ARGUMENTS or not isinstance(args[3], bool):  # packed sequences
            return fused.row_by_row(func, args, {})
        values, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first = args
        states = hx if isinstance(hx, (tuple, list)) else (hx,)
        directions = 2 if bidirectional else 1
        fits = len(params) == layers * directions * (4 if has_biases else 2)  # projections have more
        between = dropout if train and layers > 1 else 0.0
        usual = fits and is_ordinary_dropout(between, values) and any(map(fused.is_stacked, (values, *params)))
        if not usual or (cell is _lstm and _has_fast_lstm(values)):
            return fused.row_by_row(func, args, {})
        values = fused.rows(values)
        own_states = [fused.rows(state).unbind(1) for state in states]
        weights = _per_direction([fused.rows(parameter) for parameter in params], 4 if has_biases else 2)
        final: list[Stacks] = []
        with fused.level.suspended():
            if batch_first:
                values = values.transpose(1, 2)
            for layer in range(layers):
                outputs = []
                for backwards in (False, True)[:directions]:
                    initial = tuple(state[len(final)] for state in own_states)
                    output, last = _run(cell, values, initial, next(weights), backwards=backwards)
                    outputs.append(output)
                    final.append(last)
                values = outputs[0] if directions == 1 else torch.cat(outputs, -1)
                if between != 0 and layer < layers - 1:
                    values = values * dropout_of_rows(fused, values, between)
            if batch_first:
                values = values.transpose(1, 2)
            last_states = [torch.stack(parts, 1) for parts in zip(*final, strict=True)]
        return (fused.wrap(values), *map(fused.wrap, last_states))

    return rule


def _has_fast_lstm(values: torch.Tensor) -> bool:
    """Return whether torch computes an LSTM with oneDNN, which for one member after the other is faster than steps."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and values.device.type == "cpu" and values.dtype == torch.float32


def _per_direction(parameters: list[torch.Tensor], number: int) -> Iterator[list[torch.Tensor]]:
    return (parameters[start : start + number] for start in range(0, len(parameters), number))


def _run(
    cell: Callable[..., Stacks],
    values: torch.Tensor,
    states: Stacks,
    weights: Sequence[torch.Tensor],
    *,
    backwards: bool,
) -> tuple[torch.Tensor, Stacks]:
    """Run one layer in one direction over [B, time, samples, features]; return the outputs and the last states."""
    members, times, samples, _ = values.shape
    input_bias, state_bias = weights[2:] or (None, None)
    from_input = linear_rows(values.reshape(members, times * samples, -1), weights[0], input_bias)
    steps = from_input.view(members, times, samples, -1).unbind(1)
    outputs = []
    for step in reversed(steps) if backwards else steps:
        states = cell(step, linear_rows(states[0], weights[1], state_bias), states)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), states


def _packing(fused: FusedOperators, func: Any, data: torch.Tensor, sizes: torch.Tensor, *options: Any) -> Any:
    """Pack or unpack all members' sequences, which have the same lengths: so has the result."""
    if not fused.is_stacked(data) or fused.is_stacked(sizes):
        return NotImplemented
    rows = fused.rows(data)
    with fused.level.suspended():
        results = [func(row, sizes, *options) for row in rows.unbind()]
        stack = torch.stack([values for values, _ in results])
    return fused.wrap(stack), results[0][1]


RULES: dict[Any, Rule] = {
    torch._VF._pack_padded_sequence: _packing,
    torch._VF._pad_packed_sequence: _packing,
    torch.lstm: _network_rule(_lstm),
    torch.gru: _network_rule(_gru),
    torch.rnn_tanh: _network_rule(_tanh),
    torch.rnn_relu: _network_rule(_relu),
    torch.lstm_cell: _cell_rule(_lstm),
    torch.gru_cell: _cell_rule(_gru),
    torch.rnn_tanh_cell: _cell_rule(_tanh),
    torch.rnn_relu_cell: _cell_rule(_relu),
}
