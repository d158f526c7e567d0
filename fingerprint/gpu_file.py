"""A JSON file that describes one GPU, for those that the datasheet table does not have.

Users write one for ``--gpu-file``; a home keeps one for each unlisted GPU that is in the machine. The fields are
those of :class:`GpuDescription`; a field that does not exist is refused, never ignored.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path

import msgspec

from fingerprint.codec import from_json
from fingerprint.errors import ConfigError, NotFoundError
from fingerprint.gpu_spec import GpuSpec
from fingerprint.interconnect import MeasuredLinks
from fingerprint.sanitize import printable

__all__ = ["MAX_FILE_BYTES", "GpuDescription", "describe", "plain_name", "read_gpu_file", "spec_of"]

MAX_FILE_BYTES = 64 * 2**10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+/()-]{0,63}")
_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])")
_GFX = re.compile(r"gfx[0-9a-f]{3,5}")
_MIB, _GB, _TERA = 2**20, 1e9, 1e12
# What no device is beyond: a figure outside is in another unit than its field's.
_LIMITS = {
    "memory_mib": (256, 2**24),
    "memory_gb_per_s": (10, 1e6),
    "tflops_16bit": (0.1, 1e6),
    "tflops_fp8": (0.1, 1e6),
    "tops_int8": (0.1, 1e6),
    "link_gb_per_s": (0.5, 1e5),
    "link_group_size": (1, 1024),
    "pcie_gb_per_s": (0.5, 1e5),
    "tdp_w": (1, 1e5),
    "usd_per_gpu_hour": (0, 1e4),
}


@dataclass(frozen=True, kw_only=True)
class GpuDescription:
    """GPU as its file describes it. Rates are peaks; 1 GB is 1e9 bytes.

    Attributes:
        name: names it in ``--gpus NAME:COUNT``; none of the listed ones.
        memory_mib: what the driver offers (``nvidia-smi``, ``rocm-smi``).
        memory_gb_per_s: bandwidth of its memory.
        tflops_16bit: dense bf16 or fp16, without sparsity.
        tflops_fp8: dense; left out: it multiplies no fp8.
        tops_int8: dense; left out: not known.
        compute_capability: of an NVIDIA GPU, as in "8.9".
        gfx: of an AMD GPU, as in "gfx942"; one of the two is needed.
        link_gb_per_s: one direction, between two GPUs that NVLink or Infinity Fabric joins; left out: PCIe alone.
        link_group_size: how many that joins; with ``link_gb_per_s``.
        link_mesh: each pair has such a link of its own, as AMD's have; else a switch or a bridge joins them.
        pcie_gb_per_s: one direction; left out: 32, as of PCIe 4.0 with 16 lanes.
        tdp_w: left out: no energy is estimated.
        usd_per_gpu_hour: left out: no price is.
        source: where the figures come from, for readers.
        interconnect: measured times of groups of GPUs, as in `iserve nodes --json`; left out: not measured.
    """

    name: str
    memory_mib: float
    memory_gb_per_s: float
    tflops_16bit: float
    tflops_fp8: float | None = None
    tops_int8: float | None = None
    compute_capability: str | None = None
    gfx: str | None = None
    link_gb_per_s: float | None = None
    link_group_size: int = 1
    link_mesh: bool = False
    pcie_gb_per_s: float = 32.0
    tdp_w: float | None = None
    usd_per_gpu_hour: float | None = None
    source: str = ""
    interconnect: tuple[MeasuredLinks, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.casefold() == "cpu":
            raise ConfigError(
                f"name is 1 to 64 letters, digits, spaces and . _ + / ( ) -, and not cpu; got {self.name[:80]!r}"
            )
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is from {least:,g} to {most:,g} in the unit of its name, got {value:g}")
        if (self.compute_capability is None) == (self.gfx is None):
            raise ConfigError(
                'give one of compute_capability (an NVIDIA GPU, as in "8.9") and gfx (an AMD GPU, as in "gfx942")'
            )
        if self.compute_capability is not None and not _CAPABILITY.fullmatch(self.compute_capability):
            raise ConfigError(f'compute_capability is like "8.9", got {self.compute_capability[:20]!r}')
        if self.gfx is not None and not _GFX.fullmatch(self.gfx):
            raise ConfigError(f'gfx is like "gfx942", got {self.gfx[:20]!r}')
        if (self.link_gb_per_s is None) != (self.link_group_size == 1):
            raise ConfigError(
                "give link_gb_per_s and link_group_size (2 or more) together, or neither: PCIe joins the GPUs then"
            )
        if self.link_mesh and self.link_gb_per_s is None:
            raise ConfigError("link_mesh goes with link_gb_per_s and link_group_size")


def spec_of(described: GpuDescription) -> GpuSpec:
    """Return the description in the units that estimates use."""
    capability = _CAPABILITY.fullmatch(described.compute_capability or "")
    pcie = described.pcie_gb_per_s * _GB
    return GpuSpec(
        name=described.name,
        memory_bytes=int(described.memory_mib * _MIB),
        memory_bytes_per_s=described.memory_gb_per_s * _GB,
        flops_16bit_per_s=described.tflops_16bit * _TERA,
        flops_8bit_per_s=None if described.tops_int8 is None else described.tops_int8 * _TERA,
        flops_fp8_per_s=None if described.tflops_fp8 is None else described.tflops_fp8 * _TERA,
        compute_capability=None if capability is None else (int(capability[1]), int(capability[2])),
        link_bytes_per_s=pcie if described.link_gb_per_s is None else described.link_gb_per_s * _GB,
        link_group_size=described.link_group_size,
        pcie_bytes_per_s=pcie,
        tdp_w=described.tdp_w,
        price_usd_per_gpu_hour=described.usd_per_gpu_hour,
        gfx=described.gfx,
        link_mesh=described.link_mesh,
        interconnect=described.interconnect,
    )


def plain_name(product: str) -> str:
    """Return a product's name in the characters that a description's name may have."""
    return re.sub(r"[^A-Za-z0-9 ._+/()-]", "-", product).strip(" ._+/()-")[:64] or "GPU"


def describe(data: bytes, what: str) -> GpuDescription:
    """Read the text of a file; ``what`` names it in errors.

    Raises:
        BadInputError: not JSON, or a value of another type than its field's.
        ConfigError: a field that does not exist, is missing or has a value that cannot be.
    """
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{what} has more than {MAX_FILE_BYTES:,} bytes; a description of one GPU is far smaller"
        )
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{what} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{what} must hold one JSON object with the fields of one GPU")
    known = [field.name for field in fields(GpuDescription)]
    for name in raw:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{what}: no field '{printable(name)[:80]}'; {hint}known are {', '.join(known)}")
    missing = [f.name for f in fields(GpuDescription) if f.default is MISSING and f.name not in raw]
    if missing:
        raise ConfigError(f"{what}: missing {', '.join(missing)}")
    try:
        return from_json(data, GpuDescription, what=what)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def read_gpu_file(path: Path) -> GpuSpec:
    """Read the GPU that the file at ``path`` describes.

    Raises:
        NotFoundError: no such file, or none that can be read.
        BadInputError, ConfigError: as :func:`describe`.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise NotFoundError(f"{path} is not a file; give the JSON file that describes the GPU")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise NotFoundError(f"cannot read {path}: {error.strerror or error}") from error
    return spec_of(describe(data, path.name))
