"""Loading of LoRA variants at a worker, over the routes of vLLM that the embedded engine has as well.

Sends one request for each call; what is loaded where is for ``iserve.gateway.variant_residency`` to know.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from fingerprint.errors import IserveError, UnavailableError
from iserve.gateway.errors import ApiError
from iserve.gateway.own_thread import in_own_thread
from iserve.gateway.worker_http import CONNECT_S, NotBegunError, origin_of, worker_headers, worker_lost
from iserve.http_stream import AnswerLostError, StreamAnswer, StreamClient
from iserve.route_table import VariantRoute, WorkerTarget

__all__ = [
    "LoadFailedError",
    "NoMemoryError",
    "VariantFolders",
    "VariantLoader",
    "keep_folders",
    "reading_pause_s",
    "without_paths",
]

_LOAD_SILENCE_S = 120.0  # next to what reading the adapter takes
_SLOWEST_READ_BYTES_PER_S = 20e6  # of a network disk that is shared
_LIST_SILENCE_S = 10.0
_LINGER_S = 1.0
_RETRY_AFTER_S = 5
_MAX_ANSWER_BYTES = 16 * 2**20  # a list of models has a few hundred bytes for each
_MAX_REASON_CHARS = 2000
_BUSY_S = 10.0  # for which a worker may have no place, or be loading the variant for another client
_ASK_AGAIN_S = 0.1
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.02, 1.0  # between two questions for a variant that is read
_PAUSE_PART = 5  # of the time that it is read already: so much later at most it is known to be there
_BEING_READ = "is still being read: ask for it again"  # our plug-in's, within vLLM's message
# Texts of torch and CUDA within vLLM's message, of the embedded engine, and of Python.
_NO_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory|has no memory for|\bMemoryError\b")
# Paths of this machine as they are in messages: quoted, or up to what no usual path has. Not those of URLs.
_PATH = re.compile(r"""(?P<quote>['"])/[^'"\n]*/(?P<last>[^/'"\n]*)(?P=quote)|(?<![\w:/.~-])/(?:[^\s'":;,()]*/)""")

_log = logging.getLogger(__name__)


class LoadFailedError(NotBegunError):
    """The worker answered that it failed to load a variant."""


class NoMemoryError(LoadFailedError):
    """The worker answered that it has no memory left for a variant."""


class VariantFolders(Protocol):
    """Source of the folders that workers load (``daemon.variants.store.VariantStore``)."""

    @property
    def root(self) -> Path:
        """Folder of them all."""
        ...

    def loadable(self, content_hash: str) -> Path:
        """Return a verified folder of that content; blocks while it is built."""
        ...

    def checked(self, content_hash: str, base: Path) -> Path:
        """Return the folder of a delta after reading all of it, and all of ``base`` once; blocks meanwhile."""
        ...


class _Error(msgspec.Struct):
    message: str = ""
    param: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)
    message: str = ""  # of vLLM before 0.10, which has no "error"


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None  # the base, of an adapter


class _Models(msgspec.Struct):
    data: list[_Model]


class VariantLoader:
    """The three requests that a worker answers about adapters.

    All raise NotReachedError (no connection), NotBegunError (another worker may do better; LoadFailedError where
    the worker said so) or ApiError (an answer for the client).
    """

    def __init__(self, workers: StreamClient, folders: VariantFolders) -> None:
        self._workers, self._folders = workers, folders

    async def folder(self, variant: VariantRoute) -> Path:
        """Return the variant's folder, as the worker reads it."""
        found = asyncio.to_thread(self._folders.loadable, variant.content_hash)
        return await self._from_store(variant, found)

    async def checked_folder(self, variant: VariantRoute, base: Path) -> Path:
        """Return the folder of a delta, after all of it was read, and all of ``base`` once."""
        found = in_own_thread(partial(self._folders.checked, variant.content_hash, base))
        return await self._from_store(variant, found)

    async def _from_store(self, variant: VariantRoute, found: Awaitable[Path]) -> Path:
        try:
            return await found
        except UnavailableError as error:
            message = f"the variant {variant.name!r} cannot be loaded now: {self._shown(variant, str(error))}"
            raise ApiError(503, message, "variant_unusable", retry_after_s=_RETRY_AFTER_S) from error
        except (IserveError, OSError) as error:  # which says what to do
            message = f"the variant {variant.name!r} cannot be loaded: {self._shown(variant, str(error))}"
            raise ApiError(500, message, "variant_unusable") from error

    def _shown(self, variant: VariantRoute, reason: str) -> str:
        """Return a reason for a client, without paths of this machine; the log has them."""
        known = [self._folders.root, *([Path(variant.base_directory)] if variant.base_directory else [])]
        shown = without_paths(reason.replace(variant.engine_name, variant.name), *known)
        if shown != reason:
            _log.warning("variant %s: %s", variant.name, reason)
        return shown

    async def load(self, target: WorkerTarget, variant: VariantRoute, folder: Path) -> None:
        """Load it; that it is loaded already is as good.

        A worker may say for a moment that it has no place, while it ends requests whose clients have left, or that
        it loads the variant, for a gateway that was killed; it is asked again then. So is one that says that it is
        still reading it, less and less often, for as long as a worker may read without an answer.
        """
        body = {"lora_name": variant.engine_name, "lora_path": str(folder)}
        silence_s = _LOAD_SILENCE_S + variant.num_bytes / _SLOWEST_READ_BYTES_PER_S
        begun_s = now_s = asyncio.get_running_loop().time()
        read_until_s, busy_until_s = now_s + silence_s, now_s + _BUSY_S
        has_failed = True
        while True:
            status, answer = await self._ask(target, "/v1/load_lora_adapter", body, variant.name, silence_s)
            if status == 200:
                return
            error = _error_of(answer)
            is_loaded = status == 400 and "already" in error.message
            if is_loaded and variant.engine_name in await self.loaded(target):
                return
            is_read = status == 500 and _BEING_READ in error.message
            if not (is_read or is_loaded or (status == 400 and error.param == "lora_name")):
                break
            now_s = asyncio.get_running_loop().time()
            if now_s >= (read_until_s if is_read else busy_until_s):
                status, has_failed = 503, False  # it may have what is not known of here
                break
            if is_read:  # it was not busy yet
                busy_until_s = now_s + _BUSY_S
            await asyncio.sleep(reading_pause_s(now_s - begun_s) if is_read else _ASK_AGAIN_S)
        reason = self._shown(variant, error.message)
        if status >= 500:
            lost = ApiError(503, f"a worker failed to load the variant {variant.name!r}: {reason}", "variant_load")
            error_type = NotBegunError
            if has_failed:
                error_type = NoMemoryError if _NO_MEMORY.search(error.message) else LoadFailedError
            raise error_type(f"answered {status} to the load of {variant.engine_name}: {reason}", lost)
        raise ApiError(400, f"the variant {variant.name!r} cannot be loaded: {reason}", "variant_load", "model")

    async def unload(self, target: WorkerTarget, engine_name: str) -> None:
        """Unload it; that it is not loaded is as good."""
        body = {"lora_name": engine_name}
        status, answer = await self._ask(target, "/v1/unload_lora_adapter", body, target.worker_id)
        if status not in (200, 404):
            lost = ApiError(503, "a worker failed to make room for the variant; try again", "variant_load")
            reason = f"answered {status} to the unload of {engine_name}: {_error_of(answer).message}"
            raise NotBegunError(reason, lost)  # its reason is of another client's variant

    async def loaded(self, target: WorkerTarget) -> frozenset[str]:
        """Return the names of all adapters that the worker has loaded."""
        status, answer = await self._ask(target, "/v1/models", None, target.worker_id)
        if status == 200:
            try:
                models = _decode_models(answer)
                return frozenset(model.id for model in models.data if model.parent is not None)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise NotBegunError(
                    f"listed its models unreadably ({error})", worker_lost(target.worker_id)
                ) from error
        raise NotBegunError(f"answered {status} to GET /v1/models", worker_lost(target.worker_id))

    async def _ask(
        self,
        target: WorkerTarget,
        path: str,
        body: dict[str, str] | None,
        name: str,
        silence_s: float = _LOAD_SILENCE_S,
    ) -> tuple[int, bytes]:
        origin, headers = origin_of(target.url), worker_headers(target.token)
        try:
            if body is None:
                response = await self._workers.get(
                    origin, path, headers, silence_s=_LIST_SILENCE_S, connect_s=CONNECT_S
                )
            else:
                response = await self._workers.post(
                    origin,
                    path,
                    headers,
                    msgspec.json.encode(body),
                    silence_s=silence_s,
                    connect_s=CONNECT_S,
                )
            answer = await _read(response)
        except TimeoutError as error:
            raise NotBegunError(f"gave no answer to {path} in time", worker_lost(name)) from error
        except AnswerLostError as error:
            raise NotBegunError(f"failed ({error})", worker_lost(name)) from error
        if response.status in (401, 503):
            raise NotBegunError("is not serving", ApiError.no_ready_worker(name, _RETRY_AFTER_S))
        return response.status, answer


async def keep_folders(loader: VariantLoader, variants: Iterable[VariantRoute]) -> None:
    """Ask for the folders of variants once more, so that they stay; one that cannot be had is logged."""
    for variant in variants:
        try:
            await loader.folder(variant)
        except ApiError as error:
            _log.warning("keeping the folder of %s: %s", variant.name, error)


def reading_pause_s(waited_s: float) -> float:
    """Return the pause until a worker is asked again for a variant that it has read for so long."""
    return min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, waited_s / _PAUSE_PART))


def without_paths(text: str, *roots: Path) -> str:
    """Return ``text`` with no more than the last part of each absolute path.

    Args:
        roots: folders whose paths are known as such, whatever characters they have.
    """
    for known in (one for root in roots for one in (root, Path(os.path.realpath(root)))):
        for folder in filter(lambda one: one.name, (known, known.parent)):  # not the root of all
            text = text.replace(f"{folder}/", "").replace(str(folder), folder.name)
    return _PATH.sub(
        lambda found: f"{found['quote']}{found['last']}{found['quote']}" if found["quote"] else "", text
    )


async def _read(response: StreamAnswer) -> bytes:
    answer = bytearray()
    try:
        while part := await response.read(_LIST_SILENCE_S):
            answer += part
            if len(answer) > _MAX_ANSWER_BYTES:
                raise AnswerLostError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
    except BaseException:
        response.close()
        raise
    await response.finish(_LINGER_S)
    return bytes(answer)


def _error_of(answer: bytes) -> _Error:
    """Return the error of an answer; its message is bounded and never empty."""
    try:
        found = _decode_error(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = _ErrorAnswer()
    message = found.error.message or found.message or "the worker gave no reason; its log may have one"
    return _Error(message=message[:_MAX_REASON_CHARS], param=found.error.param)


_decode_error = msgspec.json.Decoder(_ErrorAnswer).decode
_decode_models = msgspec.json.Decoder(_Models).decode
