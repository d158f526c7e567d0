"""The running installation, for commands that need one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from daemon.process import is_alive, read_record
from fingerprint.errors import UnavailableError
from iserve.api_types import ReplicatedRequest
from iserve.settings import Settings, load_settings

if TYPE_CHECKING:
    from iserve.client import ControllerClient

__all__ = [
    "check_variant_name",
    "client",
    "client_for_plan",
    "folder_argument",
    "gateway_url",
    "model_argument",
    "registered_models",
    "with_model_arguments",
]

Request = TypeVar("Request", bound=ReplicatedRequest)


def client(settings: Settings | None = None, *, start: bool = True) -> ControllerClient:
    """Return this home's controller, started when ``start``."""
    from iserve.client import connect

    return connect(settings or load_settings(), start=start)


def client_for_plan(settings: Settings) -> ControllerClient:
    """Return this home's controller, for a plan of the devices here. Says so where it starts the home.

    Raises:
        UnavailableError: it does not start; the message names the way to plan without it.
    """
    from iserve.client import controller_record
    from iserve.planning.words import ELSEWHERE

    was_down = controller_record(settings) is None
    try:
        found = client(settings)
    except UnavailableError as error:
        raise UnavailableError(f"{error}; {ELSEWHERE}") from error
    if was_down:
        said = "this home was down and is up now; `iserve down` ends it, --gpus plans without it"
        typer.echo(f"iserve: {said}", err=True)
    return found


def folder_argument(folder: str) -> str:
    """Return a folder that is there, made absolute: the controller has another working directory.

    Raises:
        NotFoundError: a path with control characters or bytes that are not UTF-8.
    """
    from iserve.model_source import existing_path, plain_path

    path = existing_path(folder)
    return plain_path(folder if path is None else str(path.resolve()))


def model_argument(model: str, settings: Settings) -> str:
    """Return what the controller is given for MODEL: a registered name as it is, which takes precedence, or a
    folder.
    """
    return model if model in registered_models(model, settings) else folder_argument(model)


def with_model_arguments(request: Request, model: str | None, settings: Settings) -> Request:
    """Return ``request`` of MODEL with every model's name as the controller is given it."""
    expected = tuple(replace(one, model=model_argument(one.model, settings)) for one in request.expected_models)
    named = None if model is None else model_argument(model, settings)
    return replace(request, model=named, expected_models=expected)


def registered_models(model: str, settings: Settings) -> dict[str, Path]:
    """Return the registered models and the demo, when ``model`` can be a registered name; needs no controller."""
    from iserve.demo import DEMO_MODEL_NAME, demo_model_path

    demo = {DEMO_MODEL_NAME: demo_model_path()}
    if "/" in model or (settings.database_url is None and not (settings.home / "state.db").exists()):
        return demo
    from iserve.state.store import Store

    store = Store.read_only(settings.state)
    try:
        return demo if store.is_new() else demo | {m.name: Path(m.directory) for m in store.models()}
    finally:
        store.close()


def check_variant_name(name: str, settings: Settings) -> None:
    """Raise ConflictError where a deployment or a model has ``name``; needs no controller."""
    from iserve.state.store import Store

    store = Store.read_only(settings.state, merged_folder=settings.merged_folder)
    try:
        if not store.is_new():
            store.variants.check_free(name)
    finally:
        store.close()


def gateway_url() -> str:
    """Return the URL of this home's OpenAI API.

    Raises:
        UnavailableError: no gateway runs.
    """
    settings = load_settings()
    record = read_record(settings.run_folder / "gateway.json")
    if record is None or not is_alive(record):
        raise UnavailableError(f"no gateway runs on {settings.home}; `iserve up` starts it")
    return record.url
