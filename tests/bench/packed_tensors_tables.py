"""Results of ``tests.bench.packed_tensors``: what they consist of, what its rules choose, and tables of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from daemon.variants import tensor_files
from fingerprint.codec import from_json
from tests.bench.kept import read_kept

__all__ = [
    "LEVELS",
    "Kind",
    "Load",
    "Packing",
    "Study",
    "chosen_level",
    "kinds_table",
    "levels_table",
    "loads_table",
    "read_study",
    "saved_table",
    "shuffle_gain",
]

LEVELS = (1, 3, 6, 9, 12, 19)
_LEAST_MB_S, _WITHIN = 50.0, 1.01  # of rule 2
_MB = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Tensors that are packed alike."""

    name: str
    model: str
    dtype: str
    num_bytes: int
    num_values: int  # codes or numbers, without padding
    zlib_bits: float  # of a value, level 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Size and speed of a kind at a level."""

    kind: str
    model: str
    level: int
    is_shuffled: bool  # the first bytes of all numbers, then their second ones
    num_bytes: int  # packed
    bits: float  # of a value
    pack_mb_s: tuple[float, ...]  # MB of the tensor, of each round
    unpack_mb_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Cold load of a content, from the page cache, packed as the store does and plain."""

    content: str
    level: int
    num_tensors: int
    num_bytes: int
    disk_bytes: int
    packed_s: tuple[float, ...]  # to make the loadable folder, of each round
    plain_s: tuple[float, ...]
    add_packed_s: tuple[float, ...]  # to add it to an empty store
    add_plain_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Results, with what they were measured by."""

    date: str
    machine: str
    zstandard: str
    elapsed_s: float
    kinds: tuple[Kind, ...]
    packings: tuple[Packing, ...]
    loads: tuple[Load, ...]


def read_study(file: Path) -> Study:
    return from_json(read_kept(file), Study, what=file.name)


def _of_level(study: Study, level: int) -> dict[tuple[str, str], Packing]:
    found = (each for each in study.packings if each.level == level and not each.is_shuffled)
    return {(each.kind, each.model): each for each in found}


def _is_packed(study: Study, packing: Packing) -> bool:
    """Return whether rule 1 packs a kind."""
    sizes = {(kind.name, kind.model): kind.num_bytes for kind in study.kinds}
    return packing.num_bytes <= tensor_files._most_packed(sizes[packing.kind, packing.model])


def _packed_kinds(study: Study) -> list[Kind]:
    """Return the kinds that rule 1 packs at some level."""
    found = {
        (each.kind, each.model) for each in study.packings if not each.is_shuffled and _is_packed(study, each)
    }
    return [kind for kind in study.kinds if (kind.name, kind.model) in found]


def chosen_level(study: Study) -> int:
    """Return the level of rule 2."""
    ratios: dict[int, float] = {}
    speeds: dict[int, float] = {}
    for level in LEVELS:
        found = [(kind, _of_level(study, level)[kind.name, kind.model]) for kind in _packed_kinds(study)]
        slowest = min(median(packing.pack_mb_s) for _, packing in found)
        if slowest >= _LEAST_MB_S:
            ratios[level] = mean(packing.num_bytes / kind.num_bytes for kind, packing in found)
            speeds[level] = 1 / mean(1 / median(packing.pack_mb_s) for _, packing in found)
    fewest = min(ratios.values())
    return max((level for level, ratio in ratios.items() if ratio <= _WITHIN * fewest), key=speeds.__getitem__)


def shuffle_gain(study: Study, level: int) -> float:
    """Return the share of packed BF16 numbers that rule 3's transform saves, in the mean over their kinds."""
    sizes = {(each.kind, each.model, each.is_shuffled): each for each in study.packings if each.level == level}
    kinds = [kind for kind in study.kinds if kind.dtype == "BF16" and not kind.name.startswith("scales")]
    return mean(
        1 - sizes[kind.name, kind.model, True].num_bytes / sizes[kind.name, kind.model, False].num_bytes
        for kind in kinds
    )


def _range(values: tuple[float, ...], form: str = ",.0f") -> str:
    low, middle, high = (format(value, form) for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def kinds_table(study: Study) -> str:
    """Return bits of a value by kind and level, in Markdown; in brackets those of shuffled bytes.

    Kept: what rule 1 makes of it at the chosen level.
    """
    lines = [
        "| tensors | model | bytes | kept | zlib 9 | " + " | ".join(f"level {level}" for level in LEVELS) + " |",
        "|---" * (5 + len(LEVELS)) + "|",
    ]
    kept = {
        (each.kind, each.model)
        for each in _of_level(study, chosen_level(study)).values()
        if _is_packed(study, each)
    }
    sizes = {(each.kind, each.model, each.level, each.is_shuffled): each.bits for each in study.packings}
    for kind in study.kinds:
        cells = []
        for level in LEVELS:
            shuffled = sizes.get((kind.name, kind.model, level, True))
            cells.append(
                f"{sizes[kind.name, kind.model, level, False]:.2f}" + (f" ({shuffled:.2f})" if shuffled else "")
            )
        form = "packed" if (kind.name, kind.model) in kept else "plain"
        cells = [kind.name, kind.model, f"{kind.num_bytes:,}", form, f"{kind.zlib_bits:.2f}", *cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def saved_table(study: Study) -> str:
    """Return what the chosen level saves of each kind, in Markdown."""
    lines = ["| tensors | model | bits a value | packed | on disk |", "|---|---|--:|--:|--:|"]
    chosen = _of_level(study, chosen_level(study))
    for kind in study.kinds:
        packing = chosen[kind.name, kind.model]
        kept = f"{packing.num_bytes / kind.num_bytes:.0%}" if _is_packed(study, packing) else "plain"
        bits = 8 * kind.num_bytes / kind.num_values
        lines.append(f"| {kind.name} | {kind.model} | {bits:.2f} | {packing.bits:.2f} | {kept} |")
    return "\n".join(lines)


def levels_table(study: Study) -> str:
    """Return speeds of the kinds that are packed, by level, in Markdown: median and range of the rounds."""
    lines = [
        "| level | packed bytes for a byte | slowest kind packs, MB/s | packs | unpacks |",
        "|---|--:|--:|--:|--:|",
    ]
    for level in LEVELS:
        found = [(kind, _of_level(study, level)[kind.name, kind.model]) for kind in _packed_kinds(study)]
        ratio = mean(packing.num_bytes / kind.num_bytes for kind, packing in found)
        slowest = min((packing.pack_mb_s for _, packing in found), key=median)
        together = [
            tuple(
                1 / mean(1 / getattr(packing, field)[index] for _, packing in found)
                for index in range(len(slowest))
            )
            for field in ("pack_mb_s", "unpack_mb_s")
        ]
        cells = " | ".join([_range(slowest), *map(_range, together)])
        lines.append(f"| {level} | {ratio:.3f} | {cells} |")
    return "\n".join(lines)


def loads_table(study: Study) -> str:
    """Return what making a loadable folder and adding take, packed and plain, in Markdown."""
    lines = [
        "| content | MB | on disk | folder of packed, s | of plain | added, packed | plain |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for load in study.loads:
        times = (load.packed_s, load.plain_s, load.add_packed_s, load.add_plain_s)
        cells = " | ".join(_range(each, ".3f") for each in times)
        lines.append(
            f"| {load.content}, {load.num_tensors} tensors | {load.num_bytes / _MB:.1f} | "
            f"{load.disk_bytes / _MB:.1f} ({load.disk_bytes / load.num_bytes:.0%}) | {cells} |"
        )
    return "\n".join(lines)
