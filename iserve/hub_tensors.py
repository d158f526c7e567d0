"""Types and shapes of a Hugging Face model's tensors, without its weights.

Of each safetensors file only the header is fetched, by HTTP range requests, and what was found is kept with the
model's config in the local Hugging Face cache, by commit. The hub is not trusted: sizes, files, redirects and time
are bounded, and the answers' ranges are checked. Proxies, certificates and the user's token are huggingface_hub's
to choose; the token goes to the hub alone, not to where it redirects.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from daemon.atomic_file import remove_stale_temporaries, write_file_atomically
from fingerprint.errors import CheckpointError, NotFoundError, UnavailableError
from fingerprint.safetensors_header import (
    INDEX_FILE,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    SINGLE_FILE,
    DeclaredTensor,
    StoredTensor,
    check_num_tensors,
    header_length,
    parse_header,
    parse_index,
    tensors_of_index,
)
from iserve.hub_files import UNREADABLE, in_time

__all__ = ["hub_tensors"]

ANSWER_TIMEOUT_S = 10.0  # between two packets
TOTAL_TIMEOUT_S = 60.0
MAX_FILES = 1_000  # the largest models have 200
MAX_BYTES = 4 * MAX_HEADER_BYTES  # of a model's headers together
MAX_REDIRECTS = 5
CONNECTIONS = 16
FIRST_BYTES = 2**17  # most headers are shorter, so that one request is enough
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_KEPT_VERSION = 1
_MAX_KEPT_BYTES = 2 * MAX_BYTES


class _Kept(msgspec.Struct):
    """Record on disk of one commit's tensors; it never changes."""

    version: int
    tensors: dict[str, tuple[str, tuple[int, ...]]]


def hub_tensors(model: str, snapshot: Path) -> Mapping[str, StoredTensor] | None:
    """Return type and shape of every tensor of ``model``; None when it has no safetensors.

    Args:
        snapshot: the folder of the local Hugging Face cache that has the model's config, named by its commit.

    Raises:
        UnavailableError: the hub does not answer, breaks off, is too slow, or offline mode is on.
        NotFoundError: the hub gives the files only to accounts with access.
        CheckpointError: a file is missing or contradicts itself, or the headers are out of bounds.
    """
    file = snapshot.parent.parent / "iserve-tensors" / f"{snapshot.name}.json"
    tensors = _kept(file)
    if tensors is None:
        with _refusals(model):
            tensors = asyncio.run(_fetch(model, snapshot.name, _client_headers()))
        if tensors:
            _keep(file, tensors)
    return MappingProxyType(tensors) if tensors else None


def _kept(file: Path) -> dict[str, StoredTensor] | None:
    try:
        if file.stat().st_size > _MAX_KEPT_BYTES:
            return None
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    if kept.version != _KEPT_VERSION:
        return None
    return {name: StoredTensor(dtype, shape) for name, (dtype, shape) in kept.tensors.items()}


def _keep(file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Keep ``tensors`` for the next time; where the cache cannot be written, it asks the hub again."""
    kept = _Kept(_KEPT_VERSION, {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        remove_stale_temporaries(file.parent, file.name)
        write_file_atomically(file, msgspec.json.encode(kept), mode=0o644)


@contextlib.contextmanager
def _refusals(model: str) -> Iterator[None]:
    """Raise what goes wrong with the hub as errors of :func:`hub_tensors`."""
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]

    wanted = f"the headers of {model}'s weights are not in the local Hugging Face cache"
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UnavailableError(
            f"{wanted}, and offline mode is on (HF_HUB_OFFLINE); ask once with a network, or download the model"
        ) from error
    except TimeoutError as error:
        raise UnavailableError(
            f"{wanted}, and the hub did not send them within {TOTAL_TIMEOUT_S:.0f} s; try again later"
        ) from error
    except (OSError, HTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UnavailableError(f"{wanted}, and the hub does not send them ({reason}); try again later") from error


def _client_headers() -> dict[str, str]:
    """Return the user's token and the client's name; to make the name, the client may ask the hub something."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    try:
        (headers,) = in_time([build_hf_headers])
    except UNREADABLE as error:
        raise UnavailableError("what answers is no Hugging Face hub; is HF_ENDPOINT right?") from error
    return dict(headers) | {"Accept-Encoding": "identity"}


async def _fetch(model: str, commit: str, headers: dict[str, str]) -> dict[str, StoredTensor]:
    from huggingface_hub import get_async_session

    async with asyncio.timeout(TOTAL_TIMEOUT_S), get_async_session() as client:
        return await _Repository(client, headers, model, commit).tensors()


class _Missing(Exception):
    """The repository has no such file."""


class _Repository:
    """Commit of a model on the hub, read through ``client`` (httpx's, of either name)."""

    def __init__(self, client: Any, headers: dict[str, str], model: str, commit: str) -> None:
        self._client = client
        self._headers = headers
        self._model = model
        self._commit = commit
        self._bytes_left = MAX_BYTES
        self._connections = asyncio.Semaphore(CONNECTIONS)

    async def tensors(self) -> dict[str, StoredTensor]:
        """Return every tensor, none when there are no safetensors."""
        try:
            index, _ = await self._read(INDEX_FILE, 0, MAX_INDEX_BYTES + 1)
        except _Missing:
            try:
                header = await self._header(SINGLE_FILE)
            except _Missing:
                return {}
            return {name: StoredTensor(tensor.dtype, tensor.shape) for name, tensor in header.items()}
        what = self._what(INDEX_FILE)
        weight_map = parse_index(index, what)
        files = sorted(set(weight_map.values()))
        if len(files) > MAX_FILES:
            raise CheckpointError(f"{what} names {len(files)} files, at most {MAX_FILES} are asked for")
        headers = await self._all_headers(files)
        declared = tensors_of_index(weight_map, headers, what)
        return {name: StoredTensor(tensor.dtype, tensor.shape) for name, _, tensor in declared}

    async def _all_headers(self, files: list[str]) -> dict[str, dict[str, DeclaredTensor]]:
        headers: dict[str, dict[str, DeclaredTensor]] = {}

        async def read(file: str) -> None:
            try:
                headers[file] = await self._header(file)
                check_num_tensors(headers.values(), self._what(INDEX_FILE))
            except _Missing:
                raise CheckpointError(
                    f"{self._what(INDEX_FILE)} names the file {file[:200]!r}, which is not there"
                ) from None

        try:
            async with asyncio.TaskGroup() as group:
                for file in files:
                    group.create_task(read(file))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the rest were cancelled, or fail alike
        return headers

    async def _header(self, file: str) -> dict[str, DeclaredTensor]:
        what = self._what(file)
        raw, file_bytes = await self._read(file, 0, FIRST_BYTES)
        if file_bytes is None:
            raise UnavailableError(f"{what}: the hub does not say how large the file is")
        end = LENGTH_BYTES + header_length(raw[:LENGTH_BYTES], what)
        if end > file_bytes:
            raise CheckpointError(
                f"{what} is truncated: expected a header of {end - LENGTH_BYTES} bytes, "
                f"has {file_bytes - LENGTH_BYTES}"
            )
        if end > len(raw):
            more, size_now = await self._read(file, len(raw), end - len(raw))
            if size_now != file_bytes:
                raise UnavailableError(f"{what} had {file_bytes} bytes, then {size_now}; try again later")
            raw += more
        return parse_header(raw[LENGTH_BYTES:end], what, file_bytes)

    async def _read(self, file: str, begin: int, num_bytes: int) -> tuple[bytes, int | None]:
        """Return at most ``num_bytes`` of a file, fewer only where it ends, and the size of all of it if known.

        A server that knows no ranges sends the file from its start: the connection is closed when there is enough.

        Raises:
            _Missing: there is no such file.
        """
        what = self._what(file)
        async with self._connections, self._answer(file, begin, num_bytes) as response:
            self._check_status(response, file)
            start, file_bytes = _start_and_file_bytes(response, what, begin)
            pieces, most = bytearray(), begin + num_bytes - start
            async for piece in response.aiter_raw():
                pieces += piece
                self._bytes_left -= len(piece)
                if self._bytes_left < 0:
                    raise CheckpointError(
                        f"{what} brings the headers of {self._model} above {MAX_BYTES} bytes, which are not read"
                    )
                if len(pieces) >= most:
                    break
        expected = most if file_bytes is None else min(most, file_bytes - start)
        if file_bytes is not None and len(pieces) < expected:
            raise UnavailableError(f"{what}: the hub sent {len(pieces)} bytes of {expected}; try again later")
        return bytes(pieces[begin - start : most]), file_bytes

    @contextlib.asynccontextmanager
    async def _answer(self, file: str, begin: int, num_bytes: int) -> AsyncIterator[Any]:
        """Yield the last answer after redirects, none of whose bodies is read."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self._model, file, revision=self._commit)
        headers = self._headers | {"Range": f"bytes={begin}-{begin + num_bytes - 1}"}
        request = self._client.build_request("GET", url, headers=headers, timeout=ANSWER_TIMEOUT_S)
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._client.send(request, stream=True, follow_redirects=False)
            try:
                if response.next_request is None:
                    yield response
                    return
                request = response.next_request  # without the token where it leads to another server
            finally:
                await response.aclose()
        raise UnavailableError(f"{self._what(file)}: the hub redirects more than {MAX_REDIRECTS} times")

    def _check_status(self, response: Any, file: str) -> None:
        status, code = response.status_code, response.headers.get("X-Error-Code", "")
        what = self._what(file)
        if status in (401, 403):
            raise NotFoundError(
                f"the hub does not have {what}, or gives it only to accounts with access; run `hf auth login`"
            )
        if status == 404 and code in ("RepoNotFound", "RevisionNotFound"):
            raise NotFoundError(f"the hub has no commit {self._commit[:40]} of {self._model} any more")
        if status == 404:
            raise _Missing
        if status == 416:
            raise CheckpointError(f"{what} is empty or shorter than its header, says the hub; it is damaged there")
        if status not in (200, 206):
            raise UnavailableError(f"the hub answered {status} for {what}; try again later")
        kind = response.headers.get("Content-Type", "")
        if kind.startswith("text/html"):
            raise UnavailableError(
                f"the answer is a web page instead of {what}; is there a login page in the network?"
            )
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise UnavailableError(f"{what} is compressed, which was not requested")

    def _what(self, file: str) -> str:
        return f"{file[:200]} of {self._model}"


def _start_and_file_bytes(response: Any, what: str, begin: int) -> tuple[int, int | None]:
    """Return the byte of the file that the answer begins with, and the file's size if the answer says it.

    Raises:
        UnavailableError: the answer is of another range than from ``begin``.
    """
    if response.status_code == 200:
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if re.fullmatch(r"[0-9]{1,19}", length) else None
    given = response.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(given)
    if match is None or int(match[1]) != begin or not begin <= int(match[2]) < int(match[3]):
        raise UnavailableError(f"{what}: bytes from {begin} were asked for, the hub sends {given[:60]!r}")
    return begin, int(match[3])
