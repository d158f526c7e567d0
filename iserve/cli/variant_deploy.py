"""``variant deploy``: a registered variant merged into its base, and served by a deployment of its own name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from iserve.api_types import DeployBody
from iserve.cli import options as o
from iserve.cli.groups import checked
from iserve.cli.variant import RegisteredArgument, size_text

if TYPE_CHECKING:
    from pathlib import Path

    from iserve.api_documents import DeploymentDocument, VariantDocument
    from iserve.client import ControllerClient
    from iserve.settings import Settings

__all__ = ["deploy", "deploy_merged"]


def deploy(
    variant: RegisteredArgument,
    *,
    request: DeployBody,
    engine: o.EngineSettings,
    refused: o.Refused = False,
    as_json: o.JsonOption = False,
) -> None:
    """Merge a registered variant into its base, and serve it by a deployment of its own, under its name.

    For a delta whose engine serves none, or a variant that is asked for all the time: it takes a whole model of
    GPU memory, and its merged checkpoint as much disk as the base, in iServe's home. Killed at any moment, the
    same command goes on. `variant rm` ends the deployment and removes the checkpoint; `rm` does so and keeps the
    variant. Options are those of `deploy`.
    """
    from iserve.api_documents import VariantDocument
    from iserve.cli.connection import client
    from iserve.cli.deploy import check_request, show_ready
    from iserve.settings import load_settings

    if request.name is not None:
        raise typer.BadParameter("the deployment has the variant's name", param_hint="'--name'")
    settings, request = load_settings(), replace(request, **engine.body())
    check_request(request)
    checked(request, settings)
    controller = client(settings)
    found = controller.get(f"/api/v1/variants/{variant}", VariantDocument)
    _check_engine(controller, request)
    o.warn_of_code(found.base, trusted=request.trust_remote_code)
    controller, ready = deploy_merged(controller, settings, found, request, quiet=as_json)
    show_ready(controller, ready, as_json=as_json, refused=refused)


def deploy_merged(
    controller: ControllerClient,
    settings: Settings,
    variant: VariantDocument,
    request: DeployBody,
    *,
    quiet: bool,
) -> tuple[ControllerClient, DeploymentDocument]:
    """Return the deployment of its own that ``variant`` has then, which serves.

    Args:
        request: of the deployment, without model and name.

    Raises:
        InfeasibleError, EngineError: it was refused, or failed; its merged checkpoint is removed, and the variant
            stays registered.
        IserveError: as ``merge_registered``.
    """
    from fingerprint.errors import ConflictError, EngineError, InfeasibleError
    from iserve.cli.connection import with_model_arguments
    from iserve.cli.deploy import wait_until_ready
    from iserve.merged_keys import merged_key
    from iserve.merged_variants import held_merge

    key = merged_key(variant.content_hash, variant.base_directory)

    def make(folder: Path) -> None:
        _merge(variant, folder, settings, quiet=quiet)
        if merged_key(variant.content_hash, variant.base_directory) != key:
            raise ConflictError(
                f"the base in {variant.base_directory} was changed while {variant.name} was merged into it; "
                "nothing is kept, and the same command again merges it anew"
            )

    def wait() -> None:
        typer.echo("iserve: waiting for another command that deploys this variant", err=True)

    if not quiet:
        typer.echo(
            f"iserve: {variant.name} is merged into {variant.base}, and becomes a deployment of its own: a whole "
            "model of GPU memory",
            err=True,
        )
    with held_merge(settings, key, make, wait) as folder:
        body = replace(with_model_arguments(request, str(folder), settings), name=variant.name)
        controller, accepted = _accepted(controller, body, folder, quiet=quiet)
    try:
        return controller, wait_until_ready(controller, accepted, quiet=quiet)
    except (InfeasibleError, EngineError) as error:
        raise type(error)(
            f"{error}; the variant {variant.name} stays registered, and its merged checkpoint is removed: `iserve "
            f"variant deploy {variant.name}` tries again"
        ) from error


def _accepted(
    controller: ControllerClient, body: DeployBody, folder: Path, *, quiet: bool
) -> tuple[ControllerClient, DeploymentDocument]:
    """Post the request for the checkpoint in ``folder``, held meanwhile, which goes where that is refused.

    It stays where a deployment has it as its model, or may have: there was no answer.
    """
    import os
    import secrets
    from contextlib import suppress

    from fingerprint.errors import IserveError, NoAnswerError
    from iserve.api_documents import DeploymentDocument
    from iserve.cli.deploy import accepted_by
    from iserve.fine_tune_folders import remove_whole

    try:
        return accepted_by(body.given(), secrets.token_hex(16), quiet=quiet)
    except NoAnswerError:
        raise
    except IserveError:
        with suppress(IserveError):
            served = controller.get("/api/v1/deployments", tuple[DeploymentDocument, ...])
            if os.path.realpath(folder) not in {os.path.realpath(one.model) for one in served}:
                remove_whole(folder)
        raise


def _check_engine(controller: ControllerClient, request: DeployBody) -> None:
    """Raise InfeasibleError, before a merge that takes long, where the engine is not installed in its release.

    Where any engine does, the controller says so after the merge.
    """
    from daemon.engines.environments import is_version
    from daemon.engines.registry import get_engine
    from fingerprint.errors import InfeasibleError
    from iserve.api_documents import EngineDocument

    engine, version = request.engine, request.engine_version
    if engine == "torch":
        get_engine(engine).pinned(version)  # part of iServe, here as at the controller
    if engine in {"auto", "torch"}:
        return
    documents = controller.get("/api/v1/engines", tuple[EngineDocument, ...])
    of_engine = [one for one in documents if one.engine == engine]
    there = [one for one in of_engine if one.version is not None and one.problem is None]
    if any(version is None or is_version(one.version or "", version) for one in there):
        return
    problems = [one.problem for one in of_engine if one.problem is not None]
    why = "; ".join(problems) or f"installed: {', '.join(one.version or '' for one in there)}"
    raise InfeasibleError(f"{engine}{'' if version is None else f' {version}'} cannot serve here: {why}")


def _merge(variant: VariantDocument, folder: Path, settings: Settings, *, quiet: bool) -> None:
    from iserve.cli.progress import StepDisplay
    from iserve.cli.variant_delta import show_units
    from iserve.registered_merges import merge_registered

    with StepDisplay(quiet=quiet) as display:

        def show(done_bytes: int, total_bytes: int) -> None:
            show_units(display, "merging", "MiB", done_bytes >> 20, total_bytes >> 20)

        expected = (variant.content_hash, variant.base_directory)
        done = merge_registered(variant.name, str(folder), settings, show, expected=expected)
    if not quiet:
        typer.echo(f"{variant.name} is merged into {variant.base}, {size_text(done.size_bytes)}")
