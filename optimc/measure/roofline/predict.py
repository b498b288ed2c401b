"""Predictions: what a step should take here, added up from constants measured one by one on synthetic programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from optimc.measure.roofline.rates import KernelKind, KernelRate, MachineRates
from optimc.measure.roofline.work import OpWork, PlanWork, StepShape, step_work


def predict_step_s(work: PlanWork, rates: MachineRates, shape: StepShape, vocab_size: int) -> float:
    """Return the seconds of one step, the engine's share included."""
    ops = step_work(work, shape)
    engine_s = rates.step_s + rates.sequence_s * (len(shape.queries) - 1)
    return execute_s(ops, rates, work) + engine_s + shape.logits_rows * vocab_size * rates.logits_row_s_per_element


def predict_prefill_s(work: PlanWork, rates: MachineRates, tokens: int, most: int, vocab_size: int) -> float:
    """Return the seconds from a prompt of `tokens` to its first token, alone, `most` tokens in a step."""
    return sum(predict_step_s(work, rates, shape, vocab_size) for shape in StepShape.prefill(tokens, most))


def predict_tpot_s(
    work: PlanWork, rates: MachineRates, batch: int, prompt: int, output: int, most: int, vocab_size: int
) -> float:
    """Return the seconds per output token of `batch` clients in a closed loop.

    Between two tokens of one client lies a step of all; and of its `output - 1` steps as many carry another client's
    prompt as there are other clients, with what those prompts add to a step.
    """
    context = prompt + output // 2
    plain_s = predict_step_s(work, rates, StepShape.decode(batch, context), vocab_size)
    if batch == 1 or output < 2:
        return plain_s
    added_s = 0.0
    for chunk in StepShape.prefill(prompt, most):
        others = StepShape.decode(batch - 1, context)
        together = StepShape(
            others.contexts + chunk.contexts, others.queries + chunk.queries, others.logits_rows + chunk.logits_rows
        )
        added_s += predict_step_s(work, rates, together, vocab_size) - plain_s
    return plain_s + (batch - 1) / (output - 1) * max(0.0, added_s)


def execute_s(ops: Sequence[OpWork], rates: MachineRates, work: PlanWork) -> float:
    """Return the seconds of a step inside the executor."""
    total = work.weight_bytes + sum(op.kv_read_bytes for op in ops)
    return sum(op_seconds(op, rates, total) for op in ops)


def op_seconds(op: OpWork, rates: MachineRates, working_set_bytes: int) -> float:
    """Return the seconds of one operation; its weights are read once per step, and the whole working set between."""
    if op.rows == 0:
        return rates.op_s
    if op.kind == "attention":
        return _attention_s(op, rates)
    if op.kind == "light":
        return _light_s(op, rates)
    exchanged_s = op.activation_bytes * rates.exchange_s_per_byte
    seconds = (
        rates.linear_op_s
        + exchanged_s
        + op.weight_bytes * kernel_s(rates, op.kind, op.group, op.rows, working_set_bytes)
    )
    if op.terms > 1:  # what the second product needs was just read
        again = kernel_s(rates, op.kind, op.group, op.rows, 0)
        seconds += (op.terms - 1) * op.weight_bytes * again
    return seconds


def kernel_s(rates: MachineRates, kind: KernelKind, group: int, rows: int, working_set_bytes: int) -> float:
    """Return the seconds per stored byte of weight.

    Between measured working sets and rows it is interpolated on logarithmic axes, between groups along 1/group, as
    scales cost their share per group. Beyond the most rows measured it is proportional to them.
    """
    tables = [each for each in rates.kernels if each.kind == kind]
    if not tables:
        raise ValueError(f"no rate of kernel {kind}")
    by_size: dict[int, list[KernelRate]] = {}
    for each in tables:
        by_size.setdefault(each.working_set_bytes, []).append(each)
    sizes = sorted(by_size)
    found = [(size, _of_group(by_size[size], group, rows)) for size in sizes]
    return _interpolated([(math.log(size), value) for size, value in found], math.log(max(1, working_set_bytes)))


def _of_group(tables: Sequence[KernelRate], group: int, rows: int) -> float:
    if len(tables) == 1 or group == 0:
        return _at_rows(tables[0].points, rows)
    points = sorted((1 / each.group, _at_rows(each.points, rows)) for each in tables)
    return _interpolated(points, 1 / group)


def _at_rows(points: Sequence[tuple[int, float]], rows: int) -> float:
    most, seconds = points[-1]
    if rows > most:
        return seconds * rows / most
    return math.exp(_interpolated([(math.log(n), math.log(value)) for n, value in points], math.log(rows)))


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at x on straight lines between the points, ascending; outside them that of the nearest."""
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1]


def _light_s(op: OpWork, rates: MachineRates) -> float:
    own_s = (
        op.norm_elements * rates.norm_s_per_element
        + op.rounded_elements * rates.round_s_per_element
        + op.rounded_groups * rates.round_s_per_group
    )
    exchanged_s = op.activation_bytes * rates.exchange_s_per_byte
    return own_s * rates.threads + exchanged_s if op.is_private else own_s + exchanged_s + rates.op_s


def _attention_s(op: OpWork, rates: MachineRates) -> float:
    rate = rates.attention[op.kv_dtype]
    return (
        rates.op_s
        + op.activation_bytes * rates.exchange_s_per_byte
        + op.heads * rate.s_per_head
        + op.alone_bytes * rate.s_per_byte
        + op.alone_elements * rate.s_per_element
        + op.together_elements * rate.prefill_s_per_element
    )
