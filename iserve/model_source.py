"""Resolution of a MODEL argument: a registered name, a local directory, or a Hugging Face id.

It finds files and reads the config; it loads no weight and judges no checkpoint (``fingerprint.checkpoint`` does).
The hub provides safetensors, JSON and tokenizer files, Python files only with permission, and no pickle.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from fingerprint.checkpoint import INDEX_FILE, SINGLE_FILE, indexed_files
from fingerprint.config_json import read_config
from fingerprint.errors import CheckpointError, NotFoundError, UnavailableError
from fingerprint.families import is_tabled, load_spec
from fingerprint.families.unsupported import refuse_other_kinds
from fingerprint.model_spec import ModelSpec
from fingerprint.model_use import AS_IT_IS, ModelUse
from fingerprint.own_code import missing_code
from fingerprint.sanitize import is_plain
from iserve.hub_files import cached_snapshot, download_code, download_config, download_weights, list_files

__all__ = ["ModelSource", "existing_path", "is_hub_id", "plain_path", "resolve"]

_HUB_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_HUB_ID = re.compile(rf"(?:{_HUB_NAME}/)?{_HUB_NAME}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found."""

    name: str  # as registered, the directory's own name, or the Hugging Face id
    directory: Path
    has_weights: bool  # safetensors are there; False: a config.json alone, good for plan, estimate and profile
    spec: ModelSpec
    use: ModelUse = AS_IT_IS  # which ``spec`` is of
    given: str | None = field(default=None, compare=False)  # the path that was asked for; None: the name was
    merged_into: str | None = None  # base of the variant ``name``, whose merged checkpoint this is; None: of none

    @property
    def title(self) -> str:
        """Name in a sentence: of a merged checkpoint with its base."""
        return self.name if self.merged_into is None else f"{self.name}, merged into {self.merged_into}"

    @property
    def argument(self) -> str:
        """MODEL argument of a command that is printed for a person to run, quoted for a shell."""
        return shlex.quote(self.given or self.name)


def resolve(
    model: str,
    registered: Mapping[str, Path] = MappingProxyType({}),
    *,
    need_weights: bool = True,
    need_code: bool = False,
) -> ModelSource:
    """Return the model that ``model`` names; registered names first, then local directories, then Hugging Face
    ids.

    An id is looked up in the local cache first. What is missing there is downloaded: the config, and, once that is
    found to be of a supported model, the weights unless ``need_weights`` is False.

    Args:
        need_code: the Python files of the model, too, all of them. They are fetched, and nothing is run.

    Raises:
        NotFoundError: no such directory and neither the cache nor the hub has it.
        UnavailableError: the cache does not have it and the hub does not answer (no network, or offline mode).
        CheckpointError: the hub has the model only as pickle.
        ConfigError, UnsupportedModelError: as ``fingerprint.families.read_spec``.
    """
    if model in registered:
        directory = registered[model]
        if not directory.is_dir():
            raise NotFoundError(f"model {model!r} is registered at {directory}, which is gone; register it again")
        return _with_code(_local(model, directory), need_code=need_code)
    path = existing_path(model)
    if path is not None:
        directory = path if path.is_dir() else path.parent
        if path.is_file() and path.name != "config.json":
            raise NotFoundError(f"{path} is a file; give the model's directory or its config.json")
        directory = directory.resolve()
        plain_path(str(directory))
        return replace(_with_code(_local(directory.name or "model", directory), need_code=need_code), given=model)
    if not is_hub_id(model):
        raise NotFoundError(
            f"there is no directory {model[:200]!r}, and it is not a Hugging Face id (owner/name) "
            "or the name of a registered model"
        )
    source = _from_hub(model, registered, need_weights=need_weights)
    if need_code and (missing := missing_code(source.directory)):
        list_files(model, f"the local Hugging Face cache has no {_listed(missing)} of {model}")  # else why not
        download_code(model, source.directory)
    return _with_code(source, need_code=need_code)


def existing_path(model: str) -> Path | None:
    """Return the file or folder that ``model`` leads to, ``~`` understood; None when there is none."""
    if not model:  # Path("") would be the current directory
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or no such user's home
        return None


def is_hub_id(model: str) -> bool:
    """Return whether ``model`` can be a Hugging Face id."""
    return bool(_HUB_ID.fullmatch(model)) and not model.endswith(".git") and not re.search(r"\.\.|--", model)


def plain_path(path: str) -> str:
    """Return ``path`` itself.

    Raises:
        NotFoundError: it has bytes that are not UTF-8, which could neither be sent as JSON nor stored, or
            characters that a terminal would obey.
    """
    if not is_plain(path):
        raise NotFoundError(
            f"the path {ascii(path)[:200]} has control characters, or bytes that are not UTF-8; rename the folder"
        )
    return path


def _with_code(source: ModelSource, *, need_code: bool) -> ModelSource:
    """Return ``source``.

    Raises:
        CheckpointError: code is needed, and a Python file of it is not there.
    """
    if need_code and (missing := missing_code(source.directory)):
        raise CheckpointError(
            f"{source.directory} has no {_listed(missing)}, which its JSON (auto_map) or its other Python files "
            "need; put all .py files of the model's repository there"
        )
    return source


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _local(name: str, directory: Path) -> ModelSource:
    spec = load_spec(directory)  # first: it says what is wrong with a directory that cannot be read
    return ModelSource(name, directory, _has_weights(directory), spec)


def _has_weights(directory: Path) -> bool:
    """Return whether all the files are there; of an index that cannot be read, whether it is (reading it will
    explain).
    """
    if (directory / SINGLE_FILE).exists():
        return True
    if not (directory / INDEX_FILE).exists():
        return False
    try:
        return all((directory / name).exists() for name in indexed_files(directory))
    except (CheckpointError, OSError):
        return True


def _from_hub(model: str, registered: Iterable[str], *, need_weights: bool) -> ModelSource:
    cached = cached_snapshot(model)
    if cached is not None and (_has_weights(cached) or not need_weights):
        return _of_hub(model, cached)
    missing = "no weights of it" if cached else "nothing complete of it"
    files = list_files(model, f"{_not_here(model, registered)}, the local Hugging Face cache has {missing}")
    directory = download_config(model, files)
    _spec_of_hub(model, directory)  # before the weights: an unsupported model is not worth their download
    if need_weights:
        if not any(re.fullmatch(r"model(-.*)?\.safetensors", file) for file in files):
            raise CheckpointError(
                f"{model} has no model.safetensors on the hub ({len(files)} other files); weights load from "
                "safetensors only; convert it"
            )
        directory = download_weights(model)
    return _of_hub(model, directory)


def _of_hub(model: str, directory: Path) -> ModelSource:
    return ModelSource(model, directory, _has_weights(directory), _spec_of_hub(model, directory))


def _spec_of_hub(model: str, directory: Path) -> ModelSpec:
    """Return the spec by its tensors where its family has no table, on the hub if need be; else by its config."""
    config = read_config(directory)
    if is_tabled(config) or _has_weights(directory):
        return load_spec(directory)
    refuse_other_kinds(config)
    from iserve.hub_tensors import hub_tensors  # asyncio, for those who ask a hub only

    try:
        tensors = hub_tensors(model, directory)
    except UnavailableError:
        tensors = None
    return load_spec(directory, tensors)


def _not_here(model: str, registered: Iterable[str]) -> str:
    """Return the places of this machine that do not have ``model``; a registered name has no ``/``."""
    no_folder = f"there is no directory {model!r}"
    if "/" in model:
        return no_folder
    names = sorted(registered)
    near = get_close_matches(model, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else f" (registered: {', '.join(names[:8])})" if names else ""
    return f"no registered model is named {model!r}{hint}, {no_folder}"
