"""How the peers' engines are started, and which of them are there to be started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from peer.engines import WorkerEngine, openvino_engine, ort_genai_engine
from peer.llama_cpp import LlamaBench, LlamaServer
from peer.names import LLAMA, LLAMA_SERVER, OPENVINO, ORT_GENAI
from peer.places import SMOLLM2, Peers
from peer.samples import Samples

Engine = TypeVar("Engine", covariant=True)


@dataclass(frozen=True)
class Starter(Generic[Engine]):
    """A peer's engine before it runs: calling it starts `program` with `model`."""

    make: Callable[[Path, Path], Engine]
    program: Path
    model: Path

    def __call__(self) -> Engine:
        return self.make(self.program, self.model)

    @property
    def missing(self) -> list[Path]:
        return [path for path in (self.program, self.model) if not path.exists()]


def for_one_request(peers: Peers, model: str) -> dict[str, Starter[LlamaBench | WorkerEngine]]:
    """Return what answers one request at a time best, of each peer."""
    return {LLAMA: Starter(LlamaBench, peers.llama_tool("llama-bench"), peers.gguf(model)), **_workers(peers, model)}


def for_sixteen_requests(peers: Peers) -> dict[str, Starter[LlamaServer | WorkerEngine]]:
    """Return what answers sixteen requests at the same time best, of each peer."""
    return {LLAMA_SERVER: llama_server(peers), **_workers(peers, SMOLLM2)}


def llama_server(peers: Peers) -> Starter[LlamaServer]:
    """llama-server with a slot for each of sixteen requests."""
    make = partial(LlamaServer, slots=16, context_tokens=512)
    return Starter(make, peers.llama_tool("llama-server"), peers.gguf(SMOLLM2))


def _workers(peers: Peers, model: str) -> dict[str, Starter[WorkerEngine]]:
    return {
        OPENVINO: Starter(openvino_engine, peers.python, peers.openvino_model(model)),
        ORT_GENAI: Starter(ort_genai_engine, peers.python, peers.ort_genai_model(model)),
    }


def set_up(starters: Mapping[str, Starter[Engine]], peers: Peers, samples: Samples) -> dict[str, Starter[Engine]]:
    """Return those whose files are there; the others are named in the section's notes."""
    present = {}
    for name, starter in starters.items():
        if starter.missing:
            paths = ", ".join(str(path.relative_to(peers.folder)) for path in starter.missing)
            samples.notes.append(f"{name}: not set up ({paths} missing)")
        else:
            present[name] = starter
    return present
