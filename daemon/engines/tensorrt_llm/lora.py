"""LoRA adapters of one ``trtllm-serve``: their names at the proxy, and the field by which its requests name them.

The engine has no loads: each request gives an adapter's number and folder (``lora_request``), and the first of a
number reads the files. What the engine keeps afterwards, cached KV included, goes by the number alone, so that a
number is of one content for as long as the engine lives. A folder that it fails to read ends its worker
(``BaseWorker._enqueue_request``), and it computes some adapters otherwise than PEFT
(``LoraManager.load_from_hf``): both are refused before the engine sees them. Read in 1.3.0rc3, never run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fingerprint.errors import ConflictError, NotFoundError, UnsupportedAdapterError

if TYPE_CHECKING:
    from fingerprint.lora import LoraAdapter

__all__ = ["TARGETS", "AdapterTable", "NamedAdapter", "RenamedAnswer", "checked_content", "with_adapter"]

# Matrices that slots have room for, as the engine names them, and as PEFT does.
TARGETS = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_4h_to_h": "down_proj",
    "mlp_gate": "up_proj",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedAdapter:
    """Adapter that requests name in ``model``."""

    name: str
    folder: Path
    number: int
    created: int  # seconds since the epoch

    @property
    def field(self) -> dict[str, str | int]:
        """Value of ``lora_request`` in a request's body."""
        return {"lora_name": self.name, "lora_int_id": self.number, "lora_path": str(self.folder)}


class AdapterTable:
    """Loaded adapters by name, and the numbers that were given to contents. For one event loop.

    Args:
        base: name of the base, which no adapter has.
        most: adapters that are loaded at once.
    """

    def __init__(self, base: str, most: int) -> None:
        self._base, self._most = base, most
        self._loaded: dict[str, NamedAdapter] = {}
        self._loading: set[str] = set()
        self._numbers: dict[str, int] = {}  # by content that the engine has read; never taken back
        self._given = 0

    def __iter__(self) -> Iterator[NamedAdapter]:
        return iter(tuple(self._loaded.values()))

    def get(self, name: str | None) -> NamedAdapter | None:
        return None if name is None else self._loaded.get(name)

    @contextmanager
    def place(self, name: str) -> Iterator[None]:
        """Keep a place for ``name`` while it is loaded.

        Raises:
            ConflictError: it is the base's, is loaded or being loaded, or no place is left.
        """
        if name == self._base:
            raise ConflictError(f"{name!r} is the base itself; give the adapter another name")
        if name in self._loaded:
            raise ConflictError(f"the adapter {name!r} is loaded already")
        if name in self._loading:
            raise ConflictError(f"the adapter {name!r} is being loaded")
        if len(self._loaded) + len(self._loading) >= self._most:
            raise ConflictError(f"{self._most} adapters are loaded, which is as many as may be; unload one")
        self._loading.add(name)
        try:
            yield
        finally:
            self._loading.discard(name)

    def numbered(self, name: str, folder: Path, content: str) -> NamedAdapter:
        """Return the adapter with the number of its content, which is a new one until the content is added.

        What the engine did not read to its end keeps a part under its number, and is not read again.
        """
        number = self._numbers.get(content)
        if number is None:
            number = self._given = self._given + 1
        return NamedAdapter(name=name, folder=folder, number=number, created=int(time.time()))

    def add(self, adapter: NamedAdapter, content: str) -> None:
        """Serve an adapter, whose content the engine has read."""
        self._numbers.setdefault(content, adapter.number)
        self._loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Take a name out of the table; raises NotFoundError where it is not in it."""
        if self._loaded.pop(name, None) is None:
            raise NotFoundError(f"no adapter {name[:200]!r} is loaded")


def checked_content(folder: Path, max_rank: int) -> str:
    """Return the hash of an adapter's content, of which all values were read.

    Raises:
        BadInputError: it cannot be read, is no plain LoRA, has a larger rank, or is one that the engine would
            compute otherwise.
    """
    from fingerprint.lora import check_values, content_sha256, read_adapter, require_supported  # loads NumPy

    adapter = read_adapter(folder, max_rank=max_rank)
    require_supported(adapter)
    if (reason := _misfit(adapter)) is not None:
        raise UnsupportedAdapterError(f"{folder.name} is not served by TensorRT-LLM: {reason}; merge it")
    check_values(adapter)
    return content_sha256(adapter)


def _misfit(adapter: LoraAdapter) -> str | None:
    """Return what the engine would leave out or compute otherwise, without an error."""
    linears = {module.name: module.name.rpartition(".")[2] for module in adapter.modules}
    unknown = next((name for name, linear in linears.items() if linear not in TARGETS.values()), None)
    if unknown is not None:
        return f"it has no place for {unknown}"
    ranks = sorted({module.rank for module in adapter.modules})
    if ranks != [adapter.config.rank]:
        of = ", ".join(map(str, ranks))
        return f"it scales each matrix by that matrix's own rank, and the ranks differ ({of})"
    if any(
        module.scale != adapter.config.scale(adapter.config.rank, adapter.config.alpha)
        for module in adapter.modules
    ):
        return "it scales all matrices by lora_alpha, and alpha_pattern gives some another"
    layers: dict[str, set[str]] = {}
    for name, linear in linears.items():
        layers.setdefault(name.rpartition(".")[0], set()).add(linear)
    alone = next((one for one, of in layers.items() if of & {"k_proj", "v_proj"} and "q_proj" not in of), None)
    if alone is not None:
        return f"it takes the sizes of q_proj for the first of q, k and v, and {alone} has no update of q_proj"
    return None


def with_adapter(body: bytes, adapter: NamedAdapter) -> bytes:
    """Return a request's body with ``lora_request`` as its first field; the rest keeps its bytes.

    The name in ``model`` stays: the engine checks none.

    Args:
        body: valid JSON, an object with a ``model`` and without a ``lora_request``.
    """
    begin = body.index(b"{") + 1
    return b'%b"lora_request":%b,%b' % (body[:begin], msgspec.json.encode(adapter.field), body[begin:])


class RenamedAnswer:
    """Answer of the engine under the adapter's name, passed on line by line, as each event of a stream is one.

    No JSON string has the bytes that are replaced, as its quotes are escaped.
    """

    def __init__(self, engine_name: str, adapter: NamedAdapter) -> None:
        before, after = msgspec.json.encode(engine_name), msgspec.json.encode(adapter.name)
        self._fields = tuple((key + before, key + after) for key in (b'"model":', b'"model": '))
        self._line: list[bytes] = []

    def whole_lines(self, piece: bytes) -> bytes:
        """Return what ``piece`` completes."""
        lines, end, rest = piece.rpartition(b"\n")
        if not end:
            self._line.append(piece)
            return b""
        whole = b"".join((*self._line, lines, end))
        self._line = [rest]
        return self._renamed(whole)

    def rest(self) -> bytes:
        """Return what no end of a line followed."""
        return self._renamed(b"".join(self._line))

    def _renamed(self, data: bytes) -> bytes:
        for before, after in self._fields:
            data = data.replace(before, after)
        return data
