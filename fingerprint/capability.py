"""Capabilities of an engine, as a value. Engines fill it in (``daemon.engines``); planners only read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from fingerprint.architectures import Architectures, Listed
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat
from fingerprint.engines import traits_of
from fingerprint.gpu_spec import GpuSpec, Vendor
from fingerprint.model_spec import ModelSpec

__all__ = ["DELTA_FAMILIES", "PLANNED_ONLY", "EngineCapabilities", "Exclusion", "Note", "Selection", "Verified"]

PLANNED_ONLY = {Vendor.AMD: "planned, not deployed by iServe: AMD"}  # vendors that no worker is started on
# Dense models that are compressed (docs/deltas.md), with linears q, k, v, o, gate, up and down, joined or not.
DELTA_FAMILIES = frozenset(
    {"gemma2", "gemma3_text", "internlm3", "iquestcoder", "llama", "mistral", "phi3", "qwen2", "qwen3"}
)
_NOT_LISTED = ""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Some of the configurations: those for which all that is given holds; ``None`` holds for every one."""

    families: frozenset[str] | None = None
    weights: frozenset[WeightFormat] | None = None
    kv: frozenset[KvFormat] | None = None
    pruning: frozenset[Pruning] | None = None
    below_compute_capability: tuple[int, int] | None = None  # holds for NVIDIA GPUs older than that only
    vendors: frozenset[Vendor] | None = None
    cut_group_size: int | None = (
        None  # holds where some rank's matrix does not have whole groups of that many inputs
    )
    stored_as: frozenset[str] | None = None  # ways in which a checkpoint is quantized: it is in one of them
    stored_other_than: frozenset[str] | None = None  # "way, form": it is quantized, and in none of these
    stored_form_ends: tuple[str, ...] = ()  # it is quantized in a form whose name ends in one of these
    cut_stored_groups: bool = (
        False  # holds where some rank's matrix does not have whole groups of the checkpoint's
    )
    keeps_latent: bool = False  # holds for models that keep a latent in place of K and V
    has_experts: bool = False  # holds for mixtures of experts
    has_slots: bool = False  # holds for configurations with adapter slots
    expert_parallel: bool = False  # holds for configurations with expert parallelism

    def applies(self, spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> bool:
        """Return whether ``config`` of ``spec`` on ``gpu`` is one of the selection."""
        if self.below_compute_capability is not None and (
            gpu.compute_capability is None or gpu.compute_capability >= self.below_compute_capability
        ):
            return False
        if self.vendors is not None and gpu.vendor not in self.vendors:
            return False
        if self.cut_group_size is not None and not _cuts_groups(spec, config.tp, self.cut_group_size):
            return False
        if self.keeps_latent and not spec.kv_head_elements:
            return False
        if (self.has_experts and not spec.is_mixture) or (self.has_slots and not config.adapter_slots):
            return False
        if self.expert_parallel and not config.expert_parallel:
            return False
        if self.cut_stored_groups and not _cuts_stored_groups(spec, config.tp):
            return False
        if self.stored_as is not None and (spec.stored is None or spec.stored.method not in self.stored_as):
            return False
        if self.stored_form_ends and (spec.stored is None or not spec.stored.form.endswith(self.stored_form_ends)):
            return False
        if self.stored_other_than is not None and (
            spec.stored is None or f"{spec.stored.method}, {spec.stored.form}" in self.stored_other_than
        ):
            return False
        return (
            (self.families is None or spec.family in self.families)
            and (self.weights is None or config.weights in self.weights)
            and (self.kv is None or config.kv in self.kv)
            and (self.pruning is None or config.pruning in self.pruning)
        )


def _cuts_groups(spec: ModelSpec, tp: int, group_size: int) -> bool:
    """Return whether a rank's inputs of some matrix are no whole number of groups.

    Q, K, V and the MLP's first matrices have the whole hidden state as inputs, the remaining ones a share of
    theirs.
    """
    shared = (spec.num_heads * spec.head_dim, spec.intermediate_size)
    return spec.hidden_size % group_size != 0 or any(width % (tp * group_size) for width in shared)


def _cuts_stored_groups(spec: ModelSpec, tp: int) -> bool:
    """Return whether :func:`_cuts_groups` holds for a checkpoint that is quantized.

    Blocks of several outputs are checked only where they are split, outputs too.
    """
    stored = spec.stored
    if stored is None or not stored.group_inputs:
        return False
    if stored.group_outputs == 1:
        return _cuts_groups(spec, tp, stored.group_inputs)
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inputs = (queries, spec.intermediate_size)
    outputs = [queries // tp, spec.intermediate_size // tp]
    if not spec.kv_head_elements:  # a latent's matrix is whole on every rank
        outputs.append(keys // min(tp, spec.num_kv_heads))
    return tp > 1 and (
        any(width % (tp * stored.group_inputs) for width in inputs)
        or any(width % stored.group_outputs for width in outputs)
    )


@dataclass(frozen=True, kw_only=True)
class Exclusion(Selection):
    """Configurations that an engine does not run though each of their formats, alone, it does."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Note(Selection):
    """Note on what must be known or done before one of these configurations is run."""

    text: str
    beforehand: bool = False  # the checkpoint itself must have been prepared; iServe prepares none

    def is_met_by(self, config: DeploymentConfig) -> bool:
        """Return whether the checkpoint was prepared: one that is served as it is stored was."""
        return self.beforehand and self.weights is not None and config.weights is WeightFormat.STORED

    def needs_another(self, spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> bool:
        """Return whether ``config`` needs another checkpoint than that of ``spec``, prepared beforehand."""
        return self.beforehand and self.applies(spec, config, gpu) and not self.is_met_by(config)


@dataclass(frozen=True, kw_only=True)
class Verified(Selection):
    """Configurations that were run; for configurations only read about there is none."""

    gpu: str | None = None  # its name in the GPU table; None: on any, CPUs included
    max_tp: int = 1
    max_pp: int = 1

    def applies(self, spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> bool:
        return (
            self.gpu in (None, gpu.name)
            and config.tp <= self.max_tp
            and config.pp <= self.max_pp
            and super().applies(spec, config, gpu)
        )


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """Capabilities of one engine. A ``None`` reason means yes; a text is the reason for the no.

    Attributes:
        architectures: model architectures it has, each with what it cannot do with it.
        weights, kv, pruning: reason per format; a format that is not listed is a no.
        max_tp, max_pp: largest degrees it runs.
        expert_parallel: reason why the GPUs of ``tp`` do not divide a mixture's experts as wholes on it.
        degree_reason: why no larger ones.
        uneven_pp_reason: why stages must hold the numbers of layers that the engine itself chooses; None: any do.
        exclusions: what it does not run of the combinations that the axes above allow.
        notes: what running some of them takes; :meth:`conditions` tells them per configuration.
        stored: reason per way of quantizing that checkpoints come in (``fingerprint.quantized.METHODS``); one that
            is not listed is a no.
        adapters: whether workers of it are started with adapter slots; of an architecture that takes adapters.
        deltas: families of models of which its slots hold deltas, all in one format.
        deltas_since: release that would hold deltas, where ``deltas`` is empty for the one that is installed.
        assumes_deltas: whether its slots are taken to hold deltas, though no release of it does: for simulations.
        cpu: whether it runs on a CPU.
        amd: whether it can be planned for AMD GPUs.
        unavailable: why no worker of it can be started here, and what to change; None where one can.
        unprofiled: why iServe cannot measure models on it; None where it can.
        verified: the part of the table that was run; the rest was read in sources and documentation.
        eager: whether each kernel of a step is launched from Python, none from a captured graph.
        adapter_kernels: whether it computes adapters by our kernels (docs/decisions/0054).
        adapters_aside: whether a worker on one GPU loads adapters next to its steps (docs/decisions/0048); plans
            count such loads as stops all the same.
        step_timed: whether its profiling worker carries our step timer (``fingerprint.depth_tied_profile``).
        own_environment: whether it runs in an interpreter of its own. Its profiling worker makes random weights by
            itself, reads nothing of iServe's and measures no peak figures of a device.
    """

    engine: str
    architectures: Architectures
    weights: Mapping[WeightFormat, str | None]
    kv: Mapping[KvFormat, str | None]
    pruning: Mapping[Pruning, str | None]
    max_tp: int
    max_pp: int
    expert_parallel: str | None = "not looked into"
    adapters: bool = False
    deltas: frozenset[str] = frozenset()
    deltas_since: str = ""
    assumes_deltas: bool = False
    cpu: bool = False
    amd: bool = False
    unavailable: str | None = None
    unprofiled: str | None = None
    verified: tuple[Verified, ...] = ()
    eager: bool = False
    adapter_kernels: bool = False
    adapters_aside: bool = False
    step_timed: bool = False
    own_environment: bool = False
    notes: tuple[Note, ...] = ()
    degree_reason: str = ""
    uneven_pp_reason: str | None = None
    exclusions: tuple[Exclusion, ...] = ()
    stored: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def deployable(self) -> bool:
        return self.unavailable is None

    def refusal(self, spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> str | None:
        """Return why this engine cannot run ``config`` of ``spec`` on ``gpu``; None when it can."""
        name = self.engine
        if (reason := self.architecture_refusal(spec)) is not None:
            return reason
        if (reason := self._vendor_refusal(gpu.vendor)) is not None:
            return reason
        if (reason := self._stored_refusal(spec, config)) is not None:
            return reason
        for axis, value, reason in (
            ("weights", config.weights, self.weights.get(config.weights, _NOT_LISTED)),
            ("kv", config.kv, self.kv.get(config.kv, _NOT_LISTED)),
            ("pruning", config.pruning, self.pruning.get(config.pruning, _NOT_LISTED)),
        ):
            if reason is not None:
                return f"{name} has no {axis}={value}" + (f": {reason}" if reason else "")
        if config.expert_parallel and self.expert_parallel is not None:
            return f"{name} has no experts=parallel: {self.expert_parallel}"
        if (reason := self._split_refusal(spec, config) or self.slots_refusal(spec, config)) is not None:
            return reason
        applying = (exclusion for exclusion in self.exclusions if exclusion.applies(spec, config, gpu))
        return next((f"{name}: {exclusion.reason}" for exclusion in applying), None)

    def _vendor_refusal(self, vendor: Vendor) -> str | None:
        if vendor is Vendor.AMD and not self.amd:
            return f"{self.engine} is not planned for AMD GPUs: it needs an NVIDIA GPU{' or a CPU' * self.cpu}"
        return f"{self.engine} needs an NVIDIA GPU" if vendor is Vendor.CPU and not self.cpu else None

    def _stored_refusal(self, spec: ModelSpec, config: DeploymentConfig) -> str | None:
        """Return why ``config`` does not suit how the checkpoint is stored; None when it does.

        Quantized checkpoints are served as they are, unquantized ones in any other format.
        """
        if spec.stored is None:
            return "the checkpoint is in 16 bits" if config.weights is WeightFormat.STORED else None
        held = f"{spec.stored.method} ({spec.stored.form})"
        if config.weights is not WeightFormat.STORED:
            return f"the checkpoint holds {held}, which nothing here converts to {config.weights}"
        if config.pruning is not Pruning.NONE:
            return f"the checkpoint holds {held}, which nothing here prunes"
        reason = self.stored.get(spec.stored.method, "not one of those it reads")
        return None if reason is None else f"{self.engine} does not run checkpoints in {held}: {reason}"

    def architecture_refusal(self, spec: ModelSpec) -> str | None:
        """Return why this engine runs no model of ``spec``'s architecture, on any device; None when it does."""
        if self.needs_code(spec) and self.architectures.brought is None:
            return (
                f"{self.engine} is never let run Python code that a model brings (auto_map of its config.json), "
                f"and takes {spec.architecture} (model_type {spec.family}) with that code only"
            )
        if self._is_brought(spec):
            return None
        reason = self.architectures.refusal(spec.architecture)
        return None if reason is None else f"{self.engine} does not run {spec.architecture}: {reason}"

    def _split_refusal(self, spec: ModelSpec, config: DeploymentConfig) -> str | None:
        found = self._listed(spec)
        if config.tp > 1 and found.no_tp is not None:
            return f"{self.engine} does not split {spec.architecture} by tensor parallelism: {found.no_tp}"
        if config.pp > 1 and found.no_pp is not None:
            return f"{self.engine} runs {spec.architecture} as one pipeline stage only: {found.no_pp}"
        if config.tp > self.max_tp:
            return self._degree_refusal("tp", self.max_tp)
        if config.pp > self.max_pp:
            return self._degree_refusal("pp", self.max_pp)
        return None

    def slots_refusal(self, spec: ModelSpec, config: DeploymentConfig) -> str | None:
        """Return why this engine cannot have the adapter slots of ``config``; None when it can, or has none."""
        if not config.adapter_slots:
            return None
        if not self.adapters:
            reason = self._listed(spec).no_lora
            said = f"{self.engine} is not started with adapter slots by this release"
            return said if reason is None else f"{said}: {reason}"
        if config.delta_mib or config.has_delta_slots:
            return self._deltas_refusal(spec, config) or self._adapters_refusal(spec)
        return self._adapters_refusal(spec)

    def _deltas_refusal(self, spec: ModelSpec, config: DeploymentConfig) -> str | None:
        """Return why slots of ``config`` hold no deltas of ``spec`` on this engine; None where they do."""
        way_out = "merge each into a deployment of its own (`iserve variant deploy`), or take the embedded engine"
        if self.deltas and not self.assumes_deltas:
            if not config.has_delta_slots:
                return f"slots of {self.engine} hold deltas of one format: give --delta-format, such as int2"
            from fingerprint.delta.slots import format_refusal  # loads NumPy: a daemon without such slots does not

            reason = format_refusal(spec, config)
            if spec.family not in self.deltas:
                reason = reason or f"the layers of {spec.architecture} were not looked into"
            return (
                reason
                and f"{self.engine} has no such slots for deltas of {spec.architecture}: {reason}; else {way_out}"
            )
        if config.delta_mib and (self.assumes_deltas or traits_of(config.engine).holds_deltas_by_size):
            return None
        if config.has_delta_slots and traits_of(config.engine).holds_deltas_by_size:
            return f"slots of {self.engine} hold deltas of any format up to a size: give --delta-mib in its place"
        release = f"install {self.deltas_since}, which does, " if self.deltas_since else ""
        return f"{self.engine} serves no deltas of full fine-tunes: {release}{way_out}"

    def _adapters_refusal(self, spec: ModelSpec) -> str | None:
        reason = self._listed(spec).no_lora
        return None if reason is None else f"{self.engine} serves no adapters of {spec.architecture}: {reason}"

    def text_only_refusal(self, spec: ModelSpec) -> str | None:
        """Return why this engine cannot leave out the towers of ``spec``; None when it can."""
        reason = self._listed(spec).no_text_only
        return (
            None if reason is None else f"{self.engine} cannot serve {spec.architecture} as text alone: {reason}"
        )

    def needs_code(self, spec: ModelSpec) -> bool:
        """Return whether this engine runs ``spec`` only with the Python code that its checkpoint brings."""
        return bool(spec.own_code) and spec.family not in self.architectures.families

    def code_refusal(self, spec: ModelSpec, *, trusted: bool) -> str | None:
        """Return why no worker of ``spec`` is started, a profiling one included, for want of permission."""
        if trusted or self.architectures.brought is None or not self.needs_code(spec):
            return None
        return (
            f"config.json names Python code of the model's repository (auto_map: {', '.join(spec.own_code)}), "
            f"without which {self.engine} does not know {spec.architecture} (model_type {spec.family}); read that "
            "code, then give --trust-remote-code (trust_remote_code: true), which runs it as the daemon's user"
        )

    def _is_brought(self, spec: ModelSpec) -> bool:
        """Return whether the model's class itself is one that the checkpoint brings and the engine may try."""
        brings_model = any(kind.startswith("AutoModel") for kind in spec.own_code)
        listed = spec.architecture in self.architectures.listed
        return brings_model and not listed and self.architectures.brought is not None and self.needs_code(spec)

    def _listed(self, spec: ModelSpec) -> Listed:
        if self._is_brought(spec) and self.architectures.brought is not None:
            return self.architectures.brought
        return self.architectures.listed.get(spec.architecture, Listed())

    def lora_refusal(self, spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> str | None:
        """Return why this engine cannot serve adapters of ``spec`` under ``config``; None when it can."""
        return self.refusal(spec, config, gpu) or self._adapters_refusal(spec)

    def conditions(self, spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> tuple[str, ...]:
        """Return what running ``config``, which :meth:`refusal` does not refuse, takes in addition to the GPUs."""
        there = () if self.deployable else (f"{self.engine} can be planned for, not deployed: {self.unavailable}",)
        if gpu.vendor in PLANNED_ONLY:
            there = (*there, PLANNED_ONLY[gpu.vendor])
        listed = self._listed(spec).note
        noted = (
            note.text for note in self.notes if note.applies(spec, config, gpu) and not note.is_met_by(config)
        )
        return tuple(dict.fromkeys((*there, *(() if listed is None else (listed,)), *noted)))

    def unseen(self, spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> str | None:
        """Return a note that ``config`` of ``spec`` was never run on ``gpu`` with this engine, else None."""
        if any(run.applies(spec, config, gpu) for run in self.verified):
            return None
        if not self.verified:
            return f"{self.engine}: capability table not verified by running it"
        if not any(run.families is None or spec.family in run.families for run in self.verified):
            lists = "" if self._listed(spec).note else f"{self.architectures.source} lists {spec.architecture}; "
            return f"{self.engine}: {lists}not run by us"
        return f"{self.engine}: not run yet with this family, these formats and degrees on this GPU"

    def unprepared(self) -> EngineCapabilities:
        """Return the table for a checkpoint that is in 16 bits and whole: what needs a prepared one is refused."""
        taken = [field.name for field in fields(Selection)]
        needing = (note for note in self.notes if note.beforehand)
        added = []
        for note in needing:
            selected = {name: getattr(note, name) for name in taken}
            if note.weights is not None:
                selected["weights"] = note.weights - {WeightFormat.STORED}
            added.append(Exclusion(reason=note.text, **selected))
        return replace(self, exclusions=(*self.exclusions, *added))

    def _degree_refusal(self, axis: str, largest: int) -> str:
        return f"{self.engine} runs {axis} up to {largest}" + (
            f": {self.degree_reason}" if self.degree_reason else ""
        )
