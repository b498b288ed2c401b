"""Reading a plan: mapped, checked before use, refused in words."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from optimc.errors import PlanCorruptError, PlanError, PlanVersionError
from optimc.plan.container import DTYPES, MAX_HEADER_BYTES, PAD_PREFIX, TensorSpec
from optimc.plan.manifest import FORMAT_VERSION, Manifest


def looks_like_a_plan(path: Path) -> bool:
    """Whether a file may be replaced by a plan: it is empty, or begins as one of any version does, damaged or not."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(256)
    except OSError:
        return False
    return not start or b'"optimc.format_version"' in start


class Plan:
    """An opened engine.plan. Tensors are read-only views of the mapped file; nothing is copied.

    The views keep the mapping alive, so closing is optional; `close` releases the file once no view is left.
    """

    def __init__(self, path: Path, manifest: Manifest, specs: dict[str, TensorSpec], data: mmap.mmap) -> None:
        self.path = path
        self.manifest = manifest
        self._specs = specs
        self.size_bytes = len(data)
        """Size of the file."""
        self._data = data
        self._bytes = np.frombuffer(data, np.uint8)
        self._verification: Future[None] | None = None

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = False) -> Plan:
        """Map the file and check its structure, version and manifest; with `verify` also every SHA-256.

        Raises PlanError if the file cannot be read, PlanCorruptError if it is truncated or damaged,
        PlanVersionError if another format version wrote it.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < 8:
                    raise PlanCorruptError(f"{path}: not an engine.plan ({size} bytes)")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise PlanError(f"{path}: {error.strerror or error}") from error
        header, data_start = _parse_header(path, data)
        manifest = _parse_manifest(path, header.pop("__metadata__", None))
        specs = _parse_specs(path, header, data_start, len(data))
        if set(specs) != set(manifest.tensors):
            differing = sorted(set(specs) ^ set(manifest.tensors))
            raise PlanCorruptError(f"{path}: manifest and container disagree on tensors {differing[:5]}")
        plan = cls(path, manifest, specs, data)
        if verify:
            plan.verify()
        return plan

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self._specs.values())

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def content_hash(self) -> str:
        """SHA-256 over all tensor names and hashes: equal for plans that compute the same from the same bytes."""
        digest = hashlib.sha256()
        for name in sorted(self.manifest.tensors):
            digest.update(f"{name} {self.manifest.tensors[name].sha256}\n".encode())
        return digest.hexdigest()

    def spec(self, name: str) -> TensorSpec:
        """Return the tensor's header entry. Raises PlanCorruptError if the plan has no such tensor."""
        try:
            return self._specs[name]
        except KeyError:
            raise PlanCorruptError(f"{self.path}: tensor '{name}' is missing") from None

    def tensor(self, name: str) -> NDArray[Any]:
        """Return a read-only view of the tensor (bf16 as uint16, fp8 as uint8)."""
        spec = self.spec(name)
        raw = self._bytes[spec.offset : spec.offset + spec.nbytes]
        return raw.view(DTYPES[spec.dtype]).reshape(spec.shape)

    def blob(self, name: str) -> bytes:
        """Return a copy of the tensor's bytes: tokenizer files, templates, program text."""
        return self.tensor(name).tobytes()

    def begin_verification(self) -> None:
        """Begin to compare every tensor with its SHA-256, in a thread of its own; `verify` waits for the result."""
        if self._verification is None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="optimc-verify")
            self._verification = pool.submit(self._check_tensors, self._bytes)
            pool.shutdown(wait=False)

    def verify(self) -> None:
        """Compare every tensor with its SHA-256. Raises PlanCorruptError naming one that differs."""
        self.begin_verification()
        assert self._verification is not None
        self._verification.result()

    def _check_tensors(self, data: NDArray[np.uint8]) -> None:
        # The largest last: hashing it needs the interpreter least, so whatever is loaded meanwhile is least disturbed.
        for spec in sorted(self, key=lambda spec: spec.nbytes):
            digest = hashlib.sha256(data[spec.offset : spec.offset + spec.nbytes].data).hexdigest()
            if digest != self.manifest.tensors[spec.name].sha256:
                raise PlanCorruptError(
                    f"{self.path}: tensor '{spec.name}' does not match its SHA-256; the file is damaged, rebuild it"
                )

    def close(self) -> None:
        """Unmap the file. Views handed out earlier keep it mapped until they are gone."""
        del self._bytes
        try:
            self._data.close()
        except BufferError:
            return  # views are alive; the mapping goes with the last of them


def _parse_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], int]:
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise PlanCorruptError(f"{path}: not an engine.plan (no safetensors header)")
    if 8 + header_bytes > len(data):
        raise PlanCorruptError(
            f"{path}: truncated: the header alone needs {8 + header_bytes:,} bytes, the file has {len(data):,}"
        )
    try:
        header = json.loads(data[8 : 8 + header_bytes])
    except (ValueError, RecursionError) as error:
        raise PlanCorruptError(f"{path}: not an engine.plan (header is not JSON)") from error
    if not isinstance(header, dict):
        raise PlanCorruptError(f"{path}: not an engine.plan (header is not an object)")
    return header, 8 + header_bytes


def _parse_manifest(path: Path, metadata: object) -> Manifest:
    if not isinstance(metadata, dict) or "optimc.format_version" not in metadata:
        raise PlanCorruptError(f"{path}: a safetensors file, but not an engine.plan; make one with `optimc build`")
    version = metadata["optimc.format_version"]
    if version != str(FORMAT_VERSION):
        raise PlanVersionError(
            f"{path}: plan format {version}, this optimc reads format {FORMAT_VERSION}; rebuild it from its recipe"
        )
    try:
        return Manifest.model_validate_json(metadata["optimc.manifest"])
    except (KeyError, ValidationError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            detail = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        else:
            detail = "absent"
        raise PlanCorruptError(f"{path}: manifest is damaged ({detail})") from error


def _parse_specs(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        try:
            begin, end = (int(value) for value in entry["data_offsets"])
            shape = tuple(int(value) for value in entry["shape"])
            spec = TensorSpec(name, str(entry["dtype"]), shape, start + begin)
            valid = min((*shape, begin), default=0) >= 0 and end - begin == spec.nbytes
        except (KeyError, TypeError, ValueError) as error:
            raise PlanCorruptError(f"{path}: header entry of tensor '{name}' is damaged") from error
        if not valid:
            raise PlanCorruptError(f"{path}: tensor '{name}': byte range does not fit its shape and dtype")
        ranges.append((begin, end, name))
        if not name.startswith(PAD_PREFIX):
            specs[name] = spec
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            raise PlanCorruptError(f"{path}: tensor '{name}' starts at byte {begin}, expected {position}")
        position = end
    if start + position != size:
        state = "truncated" if size < start + position else "longer than its header says"
        raise PlanCorruptError(
            f"{path}: {state}: the header describes {start + position:,} bytes, the file has {size:,}"
        )
    return specs
