"""Export: a transformers config becomes a dialect graph without weights."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from optimc.errors import UnsupportedModelError
from optimc_passes.dialect.rules import OPSET
from optimc_passes.frontend.attention import paged_attention_registered
from optimc_passes.frontend.cleanup import clean_up
from optimc_passes.frontend.names import rename
from optimc_passes.frontend.parameters import parameters_to_inputs
from optimc_passes.frontend.skeleton import build_skeleton
from optimc_passes.graph.exported import Exported

_MODEL = "causal_lm"


class _PackedStep(nn.Module):
    """The exported function: one step's packed tokens in, logits of the asked rows out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.causal_lm = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """Map input_ids [T], position_ids [T], logits_rows [R], all int64, to logits [R, V] float32."""
        output = self.causal_lm(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, logits_to_keep=logits_rows
        )
        logits: torch.Tensor = output.logits
        return logits.squeeze(0)


def export_checked(config: Any) -> Exported:
    """Export a config that `check_supported` has passed; see `export_graph`."""
    with paged_attention_registered(), _quiet():
        model = build_skeleton(config)
        exported = _export(_PackedStep(model).eval(), type(model).__name__)
    raw_nodes = exported.graph.num_nodes()
    parameters_to_inputs(exported.graph, _parameter_names(model))
    raw = exported.clone()
    rewrites = clean_up(exported)
    rename(exported.graph, _MODEL)
    exported.graph.name = type(model).__name__
    exported.graph.metadata_props.clear()
    exported.metadata_props.clear()
    return Exported(exported, raw_nodes, rewrites, raw)


def _export(step: nn.Module, architecture: str) -> ir.Model:
    """Run the exporter on a step of 7 tokens, 3 of them with logits; both counts stay free."""
    tokens, rows = torch.export.Dim("T"), torch.export.Dim("R")
    try:
        program = torch.onnx.export(
            step,
            (torch.arange(7), torch.arange(7), torch.tensor([2, 3, 6])),
            dynamo=True,
            optimize=False,
            opset_version=OPSET,
            dynamic_shapes=({0: tokens}, {0: tokens}, {0: rows}),
            input_names=["input_ids", "position_ids", "logits_rows"],
            output_names=["logits"],
            verbose=False,
        )
    except Exception as error:  # the exporter wraps whatever the model's code raised, ours included
        cause = _innermost(error)
        if isinstance(cause, UnsupportedModelError):
            raise UnsupportedModelError(f"{architecture}: {cause}") from error
        raise UnsupportedModelError(f"{architecture}: torch cannot export it: {_one_line(cause)}") from error
    assert program is not None
    return program.model


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _parameter_names(model: nn.Module) -> dict[str, str]:
    """Map the exporter's initializer names to parameter names; of a tied parameter, each of its names to the first."""
    first: dict[int, str] = {}
    return {
        f"{_MODEL}.{name}": first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch and transformers say to their own developers while a model is built and exported."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers")
    ]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
