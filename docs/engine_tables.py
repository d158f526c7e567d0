"""The page of what each engine runs, from the engines' own tables: ``docs/generate.py`` writes it.

Every cell is an answer of ``EngineCapabilities``, asked as a plan asks; a reason that recurs is a numbered note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from daemon.engines.registry import ENGINES
from daemon.engines.vllm.release import delta_release
from fingerprint.capability import DELTA_FAMILIES, EngineCapabilities, Exclusion, Selection, Verified
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, SlotFormat, WeightFormat
from fingerprint.engines import traits_of
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from iserve.report.markdown import markdown_table

__all__ = ["engine_tables"]

_GENERATIONS = (
    ("CPU", None),
    ("Volta 7.0", (7, 0)),
    ("Turing 7.5", (7, 5)),
    ("Ampere 8.0", (8, 0)),
    ("Ampere 8.6", (8, 6)),
    ("Ada 8.9", (8, 9)),
    ("Hopper 9.0", (9, 0)),
    ("Blackwell 10.0", (10, 0)),
    ("AMD MI300 and later", "gfx942"),
)
_TABLES = tuple(engine.table for engine in ENGINES.values())  # whatever is installed here
_HEAD = """\
# What each engine runs

Made by `docs/generate.py` from the tables that plans are made with (`daemon/engines/`). Asked for a shape that
every degree divides; what a model's own shape rules out (heads that `tp` does not divide, more stages than layers)
is not an engine's matter and comes on top. A table that is not verified was read in the engine's sources and
documentation, and nothing of it was run.

Architectures are the class names that `config.json` has. Those here are of the newest vLLM that iServe knows and
of the newest transformers that it takes; what is installed tells its own
([decision 26](decisions/0026-architectures.md)). What is listed and was not run is planned with a note.
"""
_DELTAS_HEAD = """\
## Deltas of full fine-tunes

Served next to their base as adapters are, in slots: of any format up to a size (`--delta-mib`), or of one format
(`--delta-format`, those below). Else merged: `iserve variant deploy`, and `iserve variant add` with
`--as-deployment`, write base + delta out and serve that by a deployment of its own
([deltas](deltas.md#deployments-of-their-own)). Which tensors slots hold, a plan says.
"""


def engine_tables() -> str:
    """The page."""
    return "\n".join([_HEAD, _deltas(), *map(_section, _TABLES)])


def _deltas() -> str:
    """Return which engine serves deltas next to their base, in which formats, and which serves them merged."""
    reasons, rows = _Reasons(""), []
    formats = [one for one in SlotFormat if one is not SlotFormat.NONE]
    for name, table in _with_deltas():
        model, gpu = _model(), _gpu(None if table.cpu else (9, 0))
        slots = [_config(table.engine, adapter_slots=1, adapter_rank=8, delta_mib=1)]
        slots += [_config(table.engine, adapter_slots=1, adapter_rank=8, delta_format=one) for one in formats]
        cells = [reasons.cell(table.slots_refusal(model, config)) for config in slots]
        merged = reasons.cell(table.refusal(model, _config(table.engine), gpu))
        families = ", ".join(f"`{one}`" for one in sorted(table.deltas)) or "all that take adapters"
        rows.append([name, *cells, merged, families if "yes" in cells else ""])
    head = ["", "`--delta-mib`", *(f"`{one}`" for one in formats), "merged", "families"]
    parts = [_DELTAS_HEAD, markdown_table(head, rows) + "\n", "Reasons:\n", *reasons.lines(), ""]
    return "\n".join(parts)


def _with_deltas() -> Iterator[tuple[str, EngineCapabilities]]:
    """Yield the engines by name, each release that differs in deltas by itself."""
    for table in _TABLES:
        traits = traits_of(table.engine)
        if not (traits.serves_deltas and traits.delta_formats):
            yield f"`{table.engine}`", table
            continue
        yield f"`{table.engine}` {delta_release()}", replace(table, deltas=DELTA_FAMILIES)
        yield f"`{table.engine}`, other releases", replace(table, deltas_since=delta_release())


class _Reasons:
    """Numbers the reasons for the noes of one engine."""

    def __init__(self, engine: str) -> None:
        self._engine, self._numbers = engine, dict[str, int]()

    def cell(self, refusal: str | None) -> str:
        if refusal is None:
            return "yes"
        said = refusal.removeprefix(f"{self._engine}: ").removeprefix(f"{self._engine} ")
        text = said.partition(": ")[2] or said  # what is refused, the table shows itself
        return f"no [{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    def lines(self) -> list[str]:
        return [f"{number}. {text}" for text, number in self._numbers.items()]


def _section(table: EngineCapabilities) -> str:
    reasons, name = _Reasons(table.engine), table.engine
    best = _gpu(None if table.cpu else (9, 0))

    def formats(values: Iterable[object], config: Callable[[object], DeploymentConfig]) -> list[list[str]]:
        return [
            [
                f"`{value}`",
                *(reasons.cell(table.refusal(_model(), config(value), _gpu(c))) for _, c in _GENERATIONS),
            ]
            for value in values
        ]

    by_generation = ["", *(generation for generation, _ in _GENERATIONS)]
    parts = [
        f"## {name}\n",
        f"tp up to {table.max_tp}, pp up to {table.max_pp}. {_verified(table)}. Architectures of "
        f"{table.architectures.source}: {len(table.architectures.listed)}. Expert parallelism: "
        f"{'where it was measured' if table.expert_parallel is None else f'no, {table.expert_parallel}'}.\n",
        markdown_table(["tp", "pp", "uneven pp", "LoRA", "architectures"], _architectures(table, reasons, best))
        + "\n",
        _refused(table, reasons),
        markdown_table(["weights", *by_generation[1:]], formats(WeightFormat, lambda w: _config(name, weights=w)))
        + "\n",
        markdown_table(["KV", *by_generation[1:]], formats(KvFormat, lambda k: _config(name, kv=k))) + "\n",
        markdown_table(["pruning", *by_generation[1:]], formats(Pruning, lambda p: _config(name, pruning=p)))
        + "\n",
        *_rest(table),
    ]
    return "\n".join([*parts, *(("Reasons:\n", *reasons.lines(), "") if reasons.lines() else ())])


def _architectures(table: EngineCapabilities, reasons: _Reasons, gpu: GpuSpec) -> list[list[str]]:
    """Return a row for each combination of what the engine can do, with all architectures of which it can."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, listed in table.architectures.listed.items():
        spec = replace(_model(), architecture=name)
        cells = (
            reasons.cell(table.refusal(spec, _config(table.engine, tp=2), gpu)),
            reasons.cell(table.refusal(spec, _config(table.engine, pp=2), gpu)),
            reasons.cell(table.refusal(spec, _config(table.engine, pp=2), gpu) or table.uneven_pp_reason),
            reasons.cell(table.lora_refusal(spec, _config(table.engine), gpu)),
            "" if listed.note is None else listed.note,
        )
        alike.setdefault(cells, []).append(name)
    ordered = sorted(alike.items(), key=lambda item: (item[0][-1], -len(item[1])))
    return [
        [*cells, f"{len(names)}{': ' if not note else f' ({note}): '}{_names(names)}"]
        for (*cells, note), names in ordered
    ]


def _refused(table: EngineCapabilities, reasons: _Reasons) -> str:
    """Return what it does not run, by reason."""
    alike: dict[str, list[str]] = {}
    for name, reason in table.architectures.reasons.items():
        alike.setdefault(reason, []).append(name)
    lines = [
        f"*   {reason}: {_names(names)}" for reason, names in sorted(alike.items(), key=lambda row: -len(row[1]))
    ]
    any_other = f"*   any other: {table.architectures.otherwise}"
    return "Not run:\n\n" + "\n".join([*lines, any_other]) + "\n"


def _names(architectures: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(architectures))


def _verified(table: EngineCapabilities) -> str:
    """Return what of it was run, in half a sentence or more."""
    if not table.verified:
        return "Not verified"
    if any(run == Verified(max_tp=table.max_tp, max_pp=table.max_pp) for run in table.verified):
        return "Verified by running it"
    runs = []
    for run in table.verified:
        axes = (("", run.families), ("weights ", run.weights), ("KV ", run.kv))
        taken = " with ".join(f"{name}{', '.join(sorted(axis))}" for name, axis in axes if axis is not None)
        runs.append(f"{taken}, tp={run.max_tp} and pp={run.max_pp} at most, on {run.gpu or 'any device'}")
    return f"Verified by running it: {'; '.join(runs)}. The rest is not"


def _rest(table: EngineCapabilities) -> list[str]:
    """Return what holds for some combinations only, and what running some of them takes."""
    parts = []
    everywhere = Exclusion(reason="")  # what the tables above show is of weights, KV, pruning and GPUs alone
    particular = [
        e
        for e in table.exclusions
        if any(
            getattr(e, name) != getattr(everywhere, name)
            for name in (
                "families",
                "cut_group_size",
                "stored_as",
                "stored_other_than",
                "stored_form_ends",
                "cut_stored_groups",
                "keeps_latent",
                "has_experts",
                "has_slots",
            )
        )
    ]
    if particular:
        lines = (f"*   {_where(e)}: {e.reason}" for e in particular)
        parts.append("Not run in some combinations:\n\n" + "\n".join(lines) + "\n")
    if table.notes:
        lines = (f"*   {_where(note)}: {note.text}" for note in table.notes)
        parts.append("To know:\n\n" + "\n".join(lines) + "\n")
    return parts


def _where(selection: Selection) -> str:
    chosen = (
        ("families", selection.families),
        ("weights", selection.weights),
        ("KV", selection.kv),
        ("pruning", selection.pruning),
    )
    parts = [
        f"{axis} " + ", ".join(f"`{value}`" for value in sorted(map(str, values)))
        for axis, values in chosen
        if values is not None
    ]
    if selection.below_compute_capability is not None:
        parts.append("GPUs below {}.{}".format(*selection.below_compute_capability))
    if selection.cut_group_size is not None:
        parts.append(f"degrees that cut groups of {selection.cut_group_size}")
    if selection.stored_as is not None:
        parts.append("stored as " + ", ".join(sorted(selection.stored_as)))
    if selection.stored_other_than is not None:
        parts.append("stored other than as " + "; ".join(sorted(selection.stored_other_than)))
    if selection.stored_form_ends:
        parts.append("forms " + "; ".join(end.removeprefix(", ") for end in selection.stored_form_ends))
    if selection.keeps_latent:
        parts.append("latent attention")
    if selection.has_experts:
        parts.append("mixtures of experts")
    if selection.has_slots:
        parts.append("adapter slots")
    if selection.expert_parallel:
        parts.append("expert parallelism")
    if selection.cut_stored_groups:
        parts.append("degrees that cut the checkpoint's own groups")
    return "; ".join(parts) or "always"


def _config(engine: str, **formats: object) -> DeploymentConfig:
    return DeploymentConfig(engine=engine, **formats)  # type: ignore[arg-type]


def _gpu(generation: tuple[int, int] | str | None) -> GpuSpec:
    """Return a GPU of a compute capability, an AMD one, or a CPU."""
    gfx = generation if isinstance(generation, str) else None
    capability = generation if isinstance(generation, tuple) else None
    fp8 = gfx is not None or (capability is not None and capability >= (8, 9))
    return GpuSpec(
        name="table",
        memory_bytes=2**36,
        memory_bytes_per_s=1e12,
        flops_16bit_per_s=1e14,
        flops_8bit_per_s=None,
        flops_fp8_per_s=2e14 if fp8 else None,
        compute_capability=capability,
        gfx=gfx,
        link_bytes_per_s=1e10,
        link_group_size=8,
        pcie_bytes_per_s=1e10,
    )


def _model() -> ModelSpec:
    """Return a model of sizes that every degree and group divides."""
    return ModelSpec(
        family="llama",
        architecture="LlamaForCausalLM",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=16384,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32768,
        max_context_tokens=4096,
        tied_embeddings=False,
        layer_params=1,
        layer_linear_params=1,
        embedding_params=1,
        head_params=1,
        final_norm_params=1,
    )
