"""vLLM as an engine: joins its table, command line, statistics and last words. Never imports it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from daemon.devices import Device
from daemon.engine_options import EngineOptions
from daemon.engines.base import Burst, Command, Container, Inside
from daemon.engines.environments import is_version
from daemon.engines.external import ExternalEngine, Installation, Interpreter, profiling_worker, wrapped
from daemon.engines.failures import explain
from daemon.engines.machine_info import gpu_machine
from daemon.engines.vllm import error_patterns, launch, metrics
from daemon.engines.vllm.architectures import architectures_of, recorded_registry
from daemon.engines.vllm.cache import in_blocks
from daemon.engines.vllm.capabilities import TABLE
from daemon.engines.vllm.contract import (
    ADAPTERS,
    FUSED_ALL_REDUCE,
    STEPS_IN_FLIGHT,
    Breach,
    Part,
    breaches,
    read_release,
)
from daemon.engines.vllm.model_registry import REGISTRY_FILE, Registry, read_registry, registry_digest
from daemon.engines.vllm.own_options import check_vllm_options
from daemon.engines.vllm.release import (
    KNOWN,
    NEWEST,
    NEWEST_RUN,
    SLOTS_SINCE,
    Standing,
    delta_release,
    has_plug_in,
    image_release,
    keeps_adapters_apart,
    serves_deltas,
    standing_of,
)
from daemon.engines.vllm.variant_plug_in import (
    PLUG_IN_PATH,
    additional_config,
    foreign_reason,
    has_adapter_kernels,
    has_background_loads,
    may_use_plug_in,
    needs_plug_in,
)
from daemon.profile_messages import ProfileLoad
from daemon.sources.source_cache import kept_reading, sources_stamp
from daemon.sources.transformers_classes import (
    MAPPINGS_FILE,
    Transformers,
    read_transformers,
    recorded_transformers,
)
from daemon.worker_spec import WorkerSpec
from daemon.worker_stats import WorkerStats
from fingerprint.architectures import Architectures
from fingerprint.capability import DELTA_FAMILIES, EngineCapabilities, Exclusion, Note
from fingerprint.codec import to_json
from fingerprint.errors import ConfigError, EngineError, IserveError
from fingerprint.measurements import ADAPTER_KERNELS_COMPONENT

__all__ = ["VllmEngine"]

_IMAGE = "vllm/vllm-openai"
_KEY_VARIABLE = "VLLM_API_KEY"
_MIDDLEWARE = "iserve_worker_key.WorkerKey"  # vLLM's own key leaves half of its routes open
_MIDDLEWARE_PATH = str(Path(__file__).parents[2] / "vllm_middleware")


class VllmEngine(ExternalEngine):
    """``vllm serve`` of the Python that ``ISERVE_VLLM_PYTHON`` names, or of an environment under the home."""

    stats_path = "/metrics"
    recommended_version = NEWEST_RUN

    def __init__(self) -> None:
        interpreter = Interpreter("ISERVE_VLLM_PYTHON", "vllm", beside=("torch", "transformers"), installable=True)
        super().__init__(TABLE, interpreter)

    def capabilities(self) -> EngineCapabilities:
        """Return the table, with what is not verified of the release that is installed."""
        table = super().capabilities()
        if not table.deployable:  # what would be installed
            return replace(
                table,
                deltas=_families_with_deltas(self.recommended_version),
                adapter_kernels=has_adapter_kernels() and has_plug_in(self.recommended_version),
                adapters_aside=has_background_loads() and has_plug_in(self.recommended_version),
            )
        found = self.installed()
        version = found.version("vllm")
        architectures, unread = _architectures(found)
        table = replace(table, architectures=architectures, notes=(*table.notes, *map(_note, unread)))
        if not keeps_adapters_apart(version):
            table = replace(table, exclusions=(*table.exclusions, _mixed_adapters(version)))
        if (has_adapter_kernels() or has_background_loads()) and not _takes_plug_in(found):
            table = replace(table, exclusions=(*table.exclusions, _foreign_plug_in(version)))
        table = replace(
            table,
            deltas=frozenset() if found.is_editable else _families_with_deltas(version),
            deltas_since=delta_release(),
            adapter_kernels=has_adapter_kernels() and _takes_plug_in(found),
            adapters_aside=has_background_loads() and _takes_plug_in(found),
        )
        standing = _standing(found)
        if standing is Standing.RUN:
            return table
        if standing is Standing.READ:
            said = f"vllm {version} is installed here; of this release the sources were read, nothing was run"
            return replace(table, notes=(*table.notes, Note(text=said)))
        how = "installed here from sources that can be edited" if found.is_editable else "installed here"
        said = (
            f"vllm {version} is {how}, which is no release that iServe knows ({KNOWN}): it has all that every "
            "worker is started with, nothing else is verified; it is profiled by the wall clock, without step "
            "timer and repeated forwards, and the errors of its times are tens of times larger"
        )
        notes = [Note(text=said)]
        if some := _missing(found, Part.SOME):
            lacking = f"vllm {version} has no {', '.join(some)}; a launch that needs one of them is refused"
            notes.append(Note(text=lacking))
        missing = _missing(found, Part.PROFILING)
        unprofiled = (
            f"vllm {version} cannot be profiled: it has no {missing[0]}; install one of {KNOWN}"
            if missing
            else None
        )
        return replace(table, notes=(*table.notes, *notes), step_timed=False, unprofiled=unprofiled)

    def versions(self, version: str | None = None) -> tuple[tuple[str, str], ...]:
        """Return the packages' versions and, where workers have them, our kernels: a profile is of one set."""
        found = super().versions(version)
        if not found or not has_adapter_kernels() or not _takes_plug_in(self.installed(version)):
            return found
        return (*found, (ADAPTER_KERNELS_COMPONENT, "iserve"))

    def standing(self, found: Installation) -> str:
        return _standing(found).value

    def check(self, found: Installation) -> None:
        """Refuse a release that lacks what every worker is started with; of those that were read, none does.

        Raises:
            EngineError: it lacks an option, a variable or a metric, which is named.
        """
        if _standing(found) is Standing.UNKNOWN:
            self._refuse_without(found, _missing(found, Part.SERVING))

    def _refuse_without(self, found: Installation, missing: Sequence[str]) -> None:
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise EngineError(
                f"vllm {found.version('vllm')} of {found.python} lacks what iServe starts it with "
                f"({missing[0]}{more}): install one of {KNOWN}, or set {self.interpreter.variable} to the Python "
                "of an environment that has one"
            )

    def shares_places(self, spec: WorkerSpec) -> bool:
        """Return whether the worker has our plug-in, which counts so."""
        try:
            return may_use_plug_in(spec) and _takes_plug_in(self.installed(spec.engine_version))
        except EngineError:
            return False

    def warm_up_bursts(self, spec: WorkerSpec) -> tuple[Burst, ...]:
        return () if spec.profiling else launch.warm_up_bursts(spec.limits)

    def check_options(self, options: EngineOptions) -> None:
        """Raises ConfigError: an argument that iServe sets, does not allow or does not know."""
        check_vllm_options(options)

    def profile_order(self, spec: WorkerSpec, order: ProfileLoad) -> ProfileLoad:
        """Raises EngineError: the order's slots need our plug-in, which is not for the release of ``spec``."""
        version = spec.engine_version
        if version is not None and needs_plug_in(order.in_slots(spec.config)) and not has_plug_in(version):
            raise EngineError(_foreign_plug_in(version).reason)
        if settings := additional_config(order.in_slots(spec.config), for_profile=True):
            order = replace(order, additional_config=json.dumps(settings))
        return in_blocks(spec, order)

    def command(self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device]) -> Command:
        """Raises EngineError: the installed release lacks something that this launch needs."""
        found = self.installed(spec.engine_version)
        python = found.python
        if spec.config.adapter_slots and not keeps_adapters_apart(found.version("vllm")):
            raise EngineError(f"vllm of {python}: {_mixed_adapters(found.version('vllm')).reason}")
        if spec.config.has_delta_slots:
            _check_deltas(found)
        takes_plug_in = _takes_plug_in(found)
        if needs_plug_in(spec.config) and not takes_plug_in:
            raise EngineError(f"vllm of {python}: {_foreign_plug_in(found.version('vllm')).reason}")
        plug_ins = (PLUG_IN_PATH,) if takes_plug_in and may_use_plug_in(spec) else ()
        if spec.profiling:
            untimed = ("--no-step-timer",) if _standing(found) is Standing.UNKNOWN else ()
            machine = to_json(gpu_machine(devices.values(), self.versions(spec.engine_version))).decode()
            return Command(
                profiling_worker(spec, found, "vllm", folder, *untimed, plug_ins=plug_ins),
                launch.environment(spec, devices, with_plug_in=takes_plug_in),
                (("machine.json", machine),),
            )
        model = launch.read_model(spec)
        options = (*launch.arguments(spec, model, devices), f"--middleware={_MIDDLEWARE}")
        environment = launch.environment(spec, devices, with_plug_in=takes_plug_in)
        if _standing(found) is Standing.UNKNOWN:
            used = _used_by(spec, model, options, environment)
            self._refuse_without(found, [what for what in _missing(found, Part.SOME) if what in used])
        server = (python, "-m", "vllm.entrypoints.cli.main", *options)
        python_path = os.pathsep.join((_MIDDLEWARE_PATH, *plug_ins))
        return Command(wrapped(spec, server, python_path=python_path, token_variable=_KEY_VARIABLE), environment)

    def container(self, spec: WorkerSpec, inside: Inside, devices: Mapping[str, Device]) -> Container:
        if spec.config.has_delta_slots:
            raise ConfigError(
                "vLLM's images have no plug-in for deltas of full fine-tunes: export a configuration without "
                "--delta-format, or deploy it with `iserve deploy`"
            )
        model = launch.read_model(replace(spec, dummy_weights=True))  # its weights may lie on another machine
        if not inside.is_whole:
            model = replace(model, has_tokenizer=True)  # likewise
        planned = inside.release or NEWEST
        release = image_release(planned)
        other = (
            f"There is no image of vLLM {planned}, which is no release; this is of the nearest, {release}: its "
            "times and memory may differ from the plan's."
        )
        code = "It runs Python code of the model (--trust-remote-code), whose files have to lie with its weights."
        adapters = (
            "Clients that reach the port can load any LoRA adapter that the container can read (POST "
            "/v1/load_lora_adapter): let the gateway before it pass neither that nor /v1/unload_lora_adapter. No "
            "adapters are loaded at its start."
        )
        notes = [] if is_version(planned, release) else [other]
        words = launch.arguments(replace(spec, checkpoint=inside.model), model, devices, with_plug_in=False)
        notes += [code] * spec.options.use.trust_remote_code + [adapters] * bool(spec.config.adapter_slots)
        return Container(
            image=f"{_IMAGE}:v{release}",
            argv=("vllm", *words),
            env=launch.environment(spec, devices, with_plug_in=False),
            notes=tuple(notes),
        )

    def read_stats(self, spec: WorkerSpec, body: bytes) -> WorkerStats:
        return metrics.read_stats(spec.served_model, body)

    def explain_failure(self, spec: WorkerSpec, exit_code: int, log_tail: str) -> IserveError:
        return explain(self.name, spec, exit_code, log_tail, error_patterns.ERROR_PATTERNS, error_patterns.DULL)


def _used_by(
    spec: WorkerSpec, model: launch.Model, options: Sequence[str], environment: Sequence[tuple[str, str]]
) -> frozenset[str]:
    """Return what the launch rests on, in the contract's words."""
    used = {f"flag {word.partition('=')[0]}" for word in options} | {f"value {word}" for word in options}
    used |= {f"variable {name}" for name, _ in environment}
    if spec.config.tp > 1:
        used.add(FUSED_ALL_REDUCE)
    if any(window is not None for window in model.spec.windows):
        used.add(STEPS_IN_FLIGHT)
    if spec.config.adapter_slots:
        used |= ADAPTERS
    return frozenset(used)


def _families_with_deltas(version: str) -> frozenset[str]:
    return DELTA_FAMILIES if serves_deltas(version) else frozenset()


def _check_deltas(found: Installation) -> None:
    """Raise EngineError: deltas were not run with the release that is installed."""
    version = found.version("vllm")
    if found.is_editable or not serves_deltas(version):
        raise EngineError(
            f"vllm {version} of {found.python} serves no deltas of full fine-tunes; export them (`iserve variant "
            "export`) and deploy each by itself, or take the embedded engine"
        )


def _takes_plug_in(found: Installation) -> bool:
    """Return whether our plug-in of variants was written for what is installed."""
    return not found.is_editable and has_plug_in(found.version("vllm"))


def _foreign_plug_in(version: str) -> Exclusion:
    """Return that what settings ask for of adapters was not written for a release."""
    return Exclusion(has_slots=True, reason=foreign_reason(version))


def _mixed_adapters(version: str) -> Exclusion:
    return Exclusion(
        has_slots=True,
        reason=f"release {version} may answer with another adapter than was asked for once one is loaded while "
        f"all slots are in use; install {SLOTS_SINCE} or a later one",
    )


def _note(text: str) -> Note:
    return Note(text=text)


def _architectures(found: Installation) -> tuple[Architectures, tuple[str, ...]]:
    """Return what an installation runs, with a line for each of its packages that cannot be read.

    What is recorded of the newest release stands in for these.
    """
    registry, transformers, unread = recorded_registry(), recorded_transformers(), list[str]()
    try:
        registry = _registry(found)
    except EngineError as error:
        unread.append(f"{error}; what vLLM {registry.version} lists is taken to be what it runs")
    if found.version("transformers"):
        try:
            transformers = kept_reading(
                read_transformers,
                Transformers,
                found.package("transformers"),
                found.version("transformers"),
                file=MAPPINGS_FILE,
            )
        except EngineError as error:
            unread.append(f"{error}; the classes of transformers {transformers.version} are taken to be there")
    return architectures_of(registry, transformers), tuple(unread)


def _registry(found: Installation) -> Registry:
    """Raises EngineError: it cannot be read."""
    package, version, known = found.package("vllm"), found.version("vllm"), recorded_registry()
    if not found.is_editable and known.version == version and registry_digest(package) == known.digest:
        return known
    return kept_reading(
        read_registry, Registry, package, version, file=REGISTRY_FILE, is_editable=found.is_editable
    )


def _missing(found: Installation, part: Part) -> list[str]:
    return [breach.what for breach in _breaches(found) if breach.part is part]


def _standing(found: Installation) -> Standing:
    """Return how far an installation is verified; sources that can be edited are those of no release."""
    return Standing.UNKNOWN if found.is_editable else standing_of(found.version("vllm"))


def _breaches(found: Installation) -> tuple[Breach, ...]:
    """Return what the installed release lacks of the contract; read anew when another one is installed there.

    Sources that can be edited are read anew when one of them changes.

    Raises:
        EngineError: its package cannot be read.
    """
    folder = found.package("vllm")
    return _breaches_of(folder, found.version("vllm"), sources_stamp(folder) if found.is_editable else "")


@lru_cache(maxsize=4)
def _breaches_of(folder: Path, version: str, edited: str) -> tuple[Breach, ...]:  # keys of the cache
    return breaches(read_release(folder))
