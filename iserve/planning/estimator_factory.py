"""From a profile to what estimates with it, and to what such an estimate takes for granted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.engines.registry import ENGINES
from fingerprint.codec import from_json
from fingerprint.errors import ConfigError, NotFoundError
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.l2 import L2
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS, RooflineEstimator
from fingerprint.estimators.towers import WithTowers
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import MeasuredKey, Profile
from fingerprint.model_spec import ModelSpec

if TYPE_CHECKING:
    from fingerprint.estimators.depth_tied import DepthTiedEstimator

__all__ = [
    "check_taken_on",
    "contradictions",
    "estimator_for",
    "is_profile_of",
    "profile_as",
    "read_profile",
    "step_tokens_of",
]


def read_profile(path: Path) -> Profile:
    """Return the profile in a file, as ``iserve profile --json`` prints it.

    Raises:
        NotFoundError: the file cannot be read.
        ConfigError: it holds no profile.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"the profile {path} cannot be read: {error.strerror or error}") from error
    return from_json(data, Profile, what=str(path))


def is_profile_of(profile: Profile, spec: ModelSpec) -> bool:
    """Return whether the layers of the profiled model, as text alone, are those of ``spec``."""
    return profile.spec.text_alone.shape_hash == spec.text_alone.shape_hash


def check_taken_on(profile: Profile, gpu: GpuSpec) -> None:
    """Raise ConfigError where ``profile`` was taken on another kind of device than ``gpu``, links apart."""
    if replace(profile.machine.device, interconnect=gpu.interconnect) != gpu:
        raise ConfigError(
            f"the profile of {profile.model} was taken on {profile.machine.device.name}, {gpu.name} is asked for"
        )


def estimator_for(profile: Profile) -> FingerprintedEstimator | DepthTiedEstimator | WithTowers:
    """Return the estimator of what was measured, scaled by the roofline of the same device and engine.

    Measured is a model as text alone; where the profile's is one with towers, their memory is added.
    """
    if profile.spec.tower_params:
        text = replace(profile, spec=profile.spec.text_alone)
        return WithTowers(_measured_estimator(text), profile.spec.tower_params)
    return _measured_estimator(profile)


def _measured_estimator(profile: Profile) -> FingerprintedEstimator | DepthTiedEstimator:
    engine = ENGINES.get(profile.engine)
    eager = frozenset({profile.engine}) if engine is not None and engine.capabilities().eager else frozenset()
    kernels = frozenset({profile.engine}) if profile.machine.has_adapter_kernels else frozenset()
    roofline = RooflineEstimator(profile.spec, profile.machine.device, eager=eager, adapter_kernels=kernels)
    if _is_depth_tied(profile):
        from fingerprint.estimators.depth_tied import DepthTiedEstimator  # its regressions take seconds to load

        return DepthTiedEstimator(profile, roofline)
    return FingerprintedEstimator(profile, roofline, memory="counted" if _is_counted(profile) else "M2")


def profile_as(spec: ModelSpec, profile: Profile) -> Profile:
    """Return ``profile``, which is of a model as text alone, as that of ``spec``, which may have its towers.

    Of layers that differ, ``spec`` says what profiles of earlier releases do not.
    """
    return replace(profile, spec=spec) if spec.tower_params or spec.layer_shapes else profile


def contradictions(profile: Profile) -> dict[MeasuredKey, str]:
    """Return where fingerprints of more layers were faster than those of fewer, beyond the noise of their runs;
    and how.

    A profile of repeated forwards was looked through as it was taken (``fingerprint.profile_checks``).
    """
    if _is_depth_tied(profile):
        return {}
    found = {}
    for effect in L2(profile).layer_effects:
        for of_what, layer in effect.below_zero:
            interval = f"{1e3 * layer.value:.3g} ms ({1e3 * layer.low:.3g} to {1e3 * layer.high:.3g})"
            at = f"(batch {effect.batch}, {effect.input_tokens} in)"
            found[effect.key] = f"one layer takes {interval} of {of_what} {at}"
    return found


def step_tokens_of(profile: Profile) -> int | None:
    """Return the tokens of the largest step that the engine was measured with.

    That is where it counts its own memory for a step of as many; None where activations were measured step by
    step, so that every size of step has its estimate.
    """
    if not (_is_depth_tied(profile) or _is_counted(profile)):
        return None
    return max((point.max_batched_tokens for point in profile.memory), default=0) or DEFAULT_MAX_BATCHED_TOKENS


def _is_counted(profile: Profile) -> bool:
    """Return whether the engine counted its own memory, for the sequences and the step that it was started for."""
    return any(point.max_batch for point in profile.memory)


def _is_depth_tied(profile: Profile) -> bool:
    return any(point.repeat > 1 for point in profile.timing)
