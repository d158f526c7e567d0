"""A model as it is used: without its towers, with images in its prompts, with its own code. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from fingerprint.capability import EngineCapabilities
from fingerprint.config import Workload
from fingerprint.config_json import read_config
from fingerprint.errors import BadInputError, ConfigError, UnsupportedModelError
from fingerprint.estimators.towers import TOWER_ELEMENT_BYTES
from fingerprint.image_tokens import image_tokens
from fingerprint.model_spec import ModelSpec
from fingerprint.model_use import ModelUse
from fingerprint.own_code import missing_code
from iserve.model_source import ModelSource
from iserve.planning.pipeline import PlanOptions
from iserve.planning.words import gib

__all__ = [
    "check_code",
    "check_code_of_each",
    "check_same_code",
    "check_use",
    "use_notes",
    "used",
    "with_expected_specs",
    "with_images",
]


def used(source: ModelSource, use: ModelUse) -> ModelSource:
    """Return ``source`` as it is used; as text alone its size is that without towers.

    Raises:
        UnsupportedModelError: the model has no towers, and text alone or images are asked for.
    """
    if (use.text_only or use.images) and not source.spec.tower_params:
        option = "--text-only" if use.text_only else "--images"
        raise UnsupportedModelError(
            f"{source.name} has no towers for images, video or sound: it reads text alone; leave {option} out"
        )
    return replace(source, use=use, spec=source.spec.text_alone if use.text_only else source.spec)


def with_expected_specs(options: PlanOptions, spec_of: Callable[[str], ModelSpec]) -> PlanOptions:
    """Return ``options`` with the models of the expected deployments looked up by their names.

    Raises:
        IserveError: as ``spec_of``, for a model that is not found or cannot be described.
        ConfigError: its context is shorter than the requests that are planned for.
    """
    looked_up = tuple(
        one if one.spec is not None else replace(one, spec=spec_of(one.name)) for one in options.expected_models
    )
    tokens = options.workload.context_tokens
    for one in looked_up:
        if one.spec is not None and one.spec.max_context_tokens < tokens:
            raise ConfigError(
                f"the expected model {one.name} has a context of {one.spec.max_context_tokens:,} tokens, requests "
                f"of {tokens:,} are planned for; leave it out or plan for shorter ones"
            )
    return replace(options, expected_models=looked_up)


def with_images(workload: Workload, source: ModelSource) -> Workload:
    """Return ``workload`` with the tokens of the images that ``source`` is used with.

    Raises:
        UnsupportedModelError: the model reads no images.
        ConfigError: config.json does not tell how many tokens one takes, or the prompt becomes too long.
    """
    use = source.use
    if not use.images:
        return workload
    each = image_tokens(read_config(source.directory)) if use.image_tokens is None else use.image_tokens
    return workload.with_images(use.images, each)


def check_use(source: ModelSource, table: EngineCapabilities) -> None:
    """Raise UnsupportedModelError where the engine cannot leave out the towers that are to be left out."""
    reason = table.text_only_refusal(source.spec) if source.use.text_only else None
    if reason is not None:
        raise UnsupportedModelError(f"{reason}; leave --text-only out")


def check_code(source: ModelSource, table: EngineCapabilities) -> None:
    """Raise ConfigError where a worker would need Python code of the model that it is not permitted to run."""
    reason = table.code_refusal(source.spec, trusted=source.use.trust_remote_code)
    if reason is not None:
        raise ConfigError(reason)


def check_code_of_each(source: ModelSource, tables: Iterable[EngineCapabilities]) -> None:
    """Raise ConfigError where each engine that may be taken needs Python code of the model, without permission."""
    able = tuple(tables)
    if not source.use.trust_remote_code and all(table.needs_code(source.spec) for table in able):
        for table in able:
            check_code(source, table)


def check_same_code(source: ModelSource, permitted_at: Iterable[str]) -> None:
    """Raise ConfigError where a permission to run a model's code was given for another folder than it is in now.

    Args:
        permitted_at: the checkpoints of the workers that were started with that permission.
    """
    if not source.use.trust_remote_code or not source.spec.own_code:
        return
    now = source.directory.resolve()
    for folder in permitted_at:
        if Path(folder).resolve() != now:
            raise ConfigError(
                f"permission to run the Python code of {source.argument} was given for {folder}, and it is now "
                f"{now}; `iserve update --trust-remote-code` gives it anew"
            )


def use_notes(source: ModelSource, workload: Workload, table: EngineCapabilities) -> tuple[str, ...]:
    """Return what a plan says of how the model is used."""
    notes = []
    if source.use.trust_remote_code:
        notes.append(
            "--trust-remote-code: the engine runs Python code of the model's repository as the daemon's user"
            + _incomplete(source)
        )
    elif table.code_refusal(source.spec, trusted=False) is not None:
        notes.append(
            f"config.json names Python code of the model (auto_map: {', '.join(source.spec.own_code)}): this plan "
            "is made from config.json and the shapes of tensors, and none of that code was run; a profile and a "
            f"deploy take --trust-remote-code{_incomplete(source)}"
        )
    if source.use.text_only:
        notes.append(
            "as text alone: the towers for images, video and sound are not loaded, and count in no figure"
        )
    elif source.spec.tower_params:
        notes.append(
            f"{gib(TOWER_ELEMENT_BYTES * source.spec.tower_params)} of its weights are towers for images, video "
            "and sound; --text-only leaves them out"
        )
    if workload.images:
        notes.append(
            f"{workload.images} x {workload.tokens_per_image} image tokens are part of each prompt; the time and "
            "memory that the tower takes to read an image are in no figure"
        )
    return tuple(notes)


def _incomplete(source: ModelSource) -> str:
    """Return what a note says of Python code that is not here; empty: all is, or none is named."""
    try:
        missing = missing_code(source.directory)
    except BadInputError as error:
        return f"; {error}"
    return f"; not here: {', '.join(missing)}" if missing else ""
