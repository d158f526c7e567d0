"""The datasheet table: which GPUs are known, by which names, with what peak figures.

Reads ``fingerprint/data/gpus.json`` (facts with their sources) and knows nothing of the machine it runs on. A
device that is not listed is unknown, never guessed from a similar one; a CPU's figures are measured, not listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources

from fingerprint.codec import from_json
from fingerprint.config import MAX_GPUS
from fingerprint.errors import ConfigError, NotFoundError
from fingerprint.gpu_spec import GpuSpec

__all__ = ["Provenance", "gpu_spec", "known_gpus", "match_device", "parse_gpus", "provenance"]

# ``NAME:COUNT`` in other orders and with other signs, as in 8xH100, 8 h100, h100*8. The x of a name is no sign.
_COUNT_FIRST = re.compile(r"\s*(?P<count>[0-9]{1,6})\s*[x×*:\s]\s*(?P<name>\S.*)")
_NAME_FIRST = re.compile(r"(?P<name>.*\S)(?:\s*[×*:\s]|(?:(?<=[0-9])|\s+)x)\s*(?P<count>[0-9]{1,6})\s*")


@dataclass(frozen=True, kw_only=True)
class _PriceSource:
    usd: float
    provider: str
    instance: str
    source: str
    date_or_commit: str


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Row of the table as the file spells it; the file's ``about`` has the fields' meanings and units."""

    product: str
    aliases: tuple[str, ...]
    nvml_names: tuple[str, ...]
    compute_capability: tuple[int, int] | None
    gfx: str | None
    memory_visible_mib: int
    memory_bytes_per_s: float
    flops_16bit_per_s: float
    flops_8bit_per_s: float | None
    flops_fp8_per_s: float | None
    link_bytes_per_s: float
    link_group_size: int
    link_mesh: bool
    link_note: str
    pcie_bytes_per_s: float
    tdp_w: float
    price_usd_per_gpu_hour: float | None
    price_sources: tuple[_PriceSource, ...]
    source: str
    source_date: str
    confidence: str
    cross_checked_against: tuple[str, ...]
    notes: str


@dataclass(frozen=True, kw_only=True)
class _Table:
    about: str
    compiled: str
    gpus: dict[str, _Row]


@cache
def _table() -> _Table:
    data = resources.files("fingerprint").joinpath("data/gpus.json").read_bytes()
    return from_json(data, _Table, what="fingerprint/data/gpus.json")


def _key(name: str) -> str:
    return " ".join(name.casefold().split())


@cache
def _by_name() -> dict[str, str]:
    return {
        _key(alias): name for name, row in _table().gpus.items() for alias in (name, row.product, *row.aliases)
    }


@cache
def _by_nvml_name() -> dict[str, str]:
    return {_key(product): name for name, row in _table().gpus.items() for product in row.nvml_names}


@cache
def _spec(name: str) -> GpuSpec:
    row = _table().gpus[name]
    return GpuSpec(
        name=name,
        memory_bytes=row.memory_visible_mib * 2**20,
        memory_bytes_per_s=row.memory_bytes_per_s,
        flops_16bit_per_s=row.flops_16bit_per_s,
        flops_8bit_per_s=row.flops_8bit_per_s,
        flops_fp8_per_s=row.flops_fp8_per_s,
        compute_capability=row.compute_capability,
        link_bytes_per_s=row.link_bytes_per_s,
        link_group_size=row.link_group_size,
        pcie_bytes_per_s=row.pcie_bytes_per_s,
        tdp_w=row.tdp_w,
        price_usd_per_gpu_hour=row.price_usd_per_gpu_hour,
        gfx=row.gfx,
        link_mesh=row.link_mesh,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Origin of a row of the table, for readers."""

    aliases: tuple[str, ...]
    source: str
    source_date: str
    notes: str


def provenance(name: str) -> Provenance:
    """Return where the figures of the GPU called ``name``, as :func:`known_gpus` lists it, are from."""
    row = _table().gpus[name]
    return Provenance(aliases=row.aliases, source=row.source, source_date=row.source_date, notes=row.notes)


def known_gpus() -> tuple[str, ...]:
    """Return names of the table's GPUs as the file lists them: NVIDIA's from small to large, then AMD's."""
    return tuple(_table().gpus)


def gpu_spec(name: str) -> GpuSpec:
    """Return the datasheet row called ``name``: a listed name, an alias (``h200``, ``a100-40gb``) or the product
    name.

    Upper and lower case are the same. ``price_usd_per_gpu_hour`` is the median of the listed on-demand prices;
    None where none was found.

    Raises:
        NotFoundError: no such row.
    """
    found = _by_name().get(_key(name))
    if found is None:
        raise _unknown(name, _nearest(name))
    return _spec(found)


def _unknown(asked: str, meant: str | None) -> NotFoundError:
    hint = "" if meant is None else f"did you mean {meant}? "
    return NotFoundError(
        f"no datasheet figures for the GPU {asked[:80]!r}; {hint}known are {', '.join(known_gpus())}; "
        "--gpu-file describes another"
    )


def _nearest(name: str) -> str | None:
    """Return the known name that is spelt most alike; None where none is."""
    return next(iter(get_close_matches(_key(name), _by_name(), n=1, cutoff=0.7)), None)


def _meant(text: str) -> str | None:
    """Return ``NAME:COUNT`` for a text that says both in another way or misspells the name."""
    found = _COUNT_FIRST.fullmatch(text) or _NAME_FIRST.fullmatch(text)
    if found is None or int(found["count"]) > MAX_GPUS:  # RTX 5000 is a name
        return _nearest(text)
    name = _nearest(found["name"])
    return None if name is None else f"{name}:{found['count']}"


def parse_gpus(text: str, described: GpuSpec | None = None) -> tuple[GpuSpec, int]:
    """Read ``NAME:COUNT`` as in ``a6000:8``; without a count, one GPU.

    Args:
        described: the GPU that is meant, by a name that the table does not have.

    Raises:
        ConfigError: several kinds, or the count is not a whole number from 1 to ``MAX_GPUS``; ``described`` has a
            name of the table.
        NotFoundError: no such GPU, or not ``described``.
    """
    if "," in text:
        raise ConfigError(f"{text[:80]!r}: GPUs of one kind are taken, as in {text.partition(',')[0][:80]}")
    name, separator, count_text = text.partition(":")
    spec = _listed(name, text) if described is None else _same(name, described)
    if not separator:
        return spec, 1
    # isascii: int() would also read other scripts' digits
    count = int(count_text) if count_text.isascii() and count_text.isdigit() and len(count_text) <= 6 else 0
    if not 1 <= count <= MAX_GPUS:
        raise ConfigError(f"{text!r}: the count of GPUs must be a whole number from 1 to {MAX_GPUS}")
    return spec, count


def _listed(name: str, text: str) -> GpuSpec:
    if _key(name) not in _by_name():
        raise _unknown(text if _COUNT_FIRST.fullmatch(text) else name, _meant(text))
    return gpu_spec(name)


def _same(name: str, described: GpuSpec) -> GpuSpec:
    """Return ``described``, which ``name`` must name."""
    if _key(described.name) in _by_name():
        raise ConfigError(f"{described.name!r} is in the datasheet table; give the GPU of the file another name")
    if _key(name) != _key(described.name):
        raise NotFoundError(f"the file describes the GPU {described.name!r}, not {name[:80]!r}")
    return described


def match_device(nvml_name: str) -> GpuSpec | None:
    """Return the datasheet row of the device that NVML calls ``nvml_name``; None when it is not listed.

    Exact product names only: an H200 NVL, an RTX 4090 D or a MIG slice is not the part whose name it contains.
    """
    found = _by_nvml_name().get(_key(nvml_name))
    return None if found is None else _spec(found)
