"""Files of a Hugging Face model: what the local cache has, what the hub has, and their download.

All that is asked of the hub is done by huggingface_hub's client, which has the user's proxies, certificates and
token. Lists and configs have a time of ours, in which they must be here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import TypeVar

from fingerprint.companion_files import COMPANION_FILES
from fingerprint.errors import NotFoundError, UnavailableError
from fingerprint.own_code import CODE_PATTERN
from fingerprint.safetensors_header import INDEX_FILE

__all__ = [
    "UNREADABLE",
    "cached_snapshot",
    "download_code",
    "download_config",
    "download_weights",
    "in_time",
    "list_files",
]

HUB_TIMEOUT_S = 5.0  # for the first answer
CONFIG_TIMEOUT_S = 60.0  # for the list of files, and for all but the weights, which take as long as they take
_CONFIG_PATTERNS = ["config.json", *COMPANION_FILES]
_WEIGHT_PATTERNS = ["model.safetensors", "model-*.safetensors", INDEX_FILE]
# What the hub's client raises on JSON that is none, or is another than a hub's.
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)
T = TypeVar("T")


def cached_snapshot(model: str) -> Path | None:
    """Return the folder of the local cache that has the config of ``model``, None when there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        directory = Path(snapshot_download(model, local_files_only=True, allow_patterns=_CONFIG_PATTERNS))
    except (OSError, HFValidationError):  # LocalEntryNotFoundError is an OSError
        return None
    return directory if (directory / "config.json").is_file() else None


def list_files(model: str, here: str) -> list[str]:
    """Return the file names of ``model``; ``here`` begins the error that says why they cannot be had.

    Raises:
        NotFoundError: the hub has no such model, or gives it only to accounts with access.
        UnavailableError: the hub does not answer, not as a hub does, or is too slow.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,  # of the HTTP library that the installed hub client uses; a refused connection is one
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        (info,) = in_time([lambda: HfApi().model_info(model, timeout=HUB_TIMEOUT_S)])
    except OfflineModeIsEnabled as error:
        raise UnavailableError(f"{here}, and offline mode is on (HF_HUB_OFFLINE); download it first") from error
    except GatedRepoError as error:
        raise NotFoundError(
            f"{here}, and the hub gives it only to accounts with access; run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFoundError(
            f"{here}, and the hub has no such model (or it is private: `hf auth login`)"
        ) from error
    except HfHubHTTPError as error:
        raise UnavailableError(f"{here}, and the hub answered {_first_line(error)}") from error
    except (OSError, HTTPError) as error:
        raise UnavailableError(f"{here}, and the hub cannot be reached ({_first_line(error)})") from error
    except UNREADABLE as error:
        raise UnavailableError(
            f"{here}, and what answers is no Hugging Face hub; is there a login page in the network, "
            "is HF_ENDPOINT right?"
        ) from error
    return [sibling.rfilename for sibling in info.siblings or []]


def download_config(model: str, files: list[str]) -> Path:
    """Return the cache's folder of ``model`` with its config and the small files next to it.

    Args:
        files: names of all files that the hub has of it.

    Raises:
        NotFoundError: there is no config.json, or the hub gives the files only to accounts with access.
        UnavailableError: the hub does not answer, breaks off, or is too slow.
    """
    from huggingface_hub import hf_hub_download

    def get(file: str) -> str:
        # By branch name, not by the commit that the hub just named: only so does the cache find it again offline.
        return hf_hub_download(model, file, etag_timeout=HUB_TIMEOUT_S)

    if "config.json" not in files:
        raise NotFoundError(f"{model} has no config.json on the hub ({len(files)} other files)")
    wanted = [file for file in _CONFIG_PATTERNS if file in files]
    with _downloading(model):
        config, *_ = in_time([partial(get, file) for file in wanted])
    return Path(config).parent


def download_weights(model: str) -> Path:
    """Return the cache's folder of ``model`` with all that serving takes.

    Raises:
        NotFoundError, UnavailableError: as :func:`download_config`, however long it takes.
    """
    from huggingface_hub import snapshot_download

    patterns = _CONFIG_PATTERNS + _WEIGHT_PATTERNS
    with _downloading(model):
        return Path(snapshot_download(model, allow_patterns=patterns, etag_timeout=HUB_TIMEOUT_S))


def download_code(model: str, snapshot: Path) -> None:
    """Put the Python files of ``model`` into its folder ``snapshot`` of the cache. They are not run.

    They are those of the commit that the folder is of, whatever the hub has since.

    Raises:
        NotFoundError, UnavailableError: as :func:`download_config`.
    """
    from huggingface_hub import snapshot_download

    with _downloading(model):
        commit = snapshot.name
        snapshot_download(model, revision=commit, allow_patterns=[CODE_PATTERN], etag_timeout=HUB_TIMEOUT_S)


@contextmanager
def _downloading(model: str) -> Iterator[None]:
    from huggingface_hub.errors import GatedRepoError, HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except GatedRepoError as error:
        raise NotFoundError(f"the hub gives {model} only to accounts with access; run `hf auth login`") from error
    except (OSError, HTTPError) as error:
        raise UnavailableError(f"downloading {model} failed: {_first_line(error)}; try again to go on") from error


def in_time(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return what ``calls`` return, made at the same time. The hub's client bounds no answer that drips.

    Raises:
        TimeoutError: not within ``CONFIG_TIMEOUT_S``. The threads are left; they keep no process from ending.
    """
    results: list[Future[T]] = [Future() for _ in calls]

    def run(call: Callable[[], T], result: Future[T]) -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            result.set_exception(error)

    for call, result in zip(calls, results, strict=True):
        Thread(target=run, args=(call, result), daemon=True).start()
    deadline = monotonic() + CONFIG_TIMEOUT_S
    try:
        return [result.result(max(0.0, deadline - monotonic())) for result in results]
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no whole answer within {CONFIG_TIMEOUT_S:.0f} s") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
