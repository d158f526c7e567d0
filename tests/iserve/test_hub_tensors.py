"""Headers of a hub's files by range requests: against the files themselves, and against hubs that misbehave."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fingerprint import safetensors_header
from fingerprint.checkpoint import INDEX_FILE, SINGLE_FILE, StoredTensor, stored_tensors
from fingerprint.errors import CheckpointError, IserveError, NotFoundError, UnavailableError
from iserve import hub_tensors as module
from iserve.hub_tensors import hub_tensors
from tests.golden_words import Golden

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "owner/model"
SECOND_FILE = "model-2.safetensors"


class Handler(BaseHTTPRequestHandler):
    """Handler of one request to a :class:`Hub`."""

    hub: Hub

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        given = self.headers.get("Range", "")
        self.hub.asked.append((name, given, self.headers.get("Authorization")))
        file = self.hub.folder / name
        body = file.read_bytes() if file.is_file() else None
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", given)
        assert match is not None, given
        try:
            if not self.hub.misbehave(self, name, body):
                self.answer_range(body, int(match[1]), int(match[2]))
        except (BrokenPipeError, ConnectionResetError):
            pass  # enough was read

    def answer_range(self, body: bytes | None, begin: int, last: int) -> bool:
        if body is None:
            return self.answer(404, b"no", X_Error_Code="EntryNotFound")
        if begin >= len(body):
            return self.answer(416, Content_Range=f"bytes */{len(body)}")
        last = min(last, len(body) - 1)
        return self.answer(206, body[begin : last + 1], Content_Range=f"bytes {begin}-{last}/{len(body)}")

    def answer(self, status: int, body: bytes = b"", length: int | None = -1, **headers: str) -> bool:
        """Answer; ``length`` is what is said of it, None: nothing."""
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(len(body) if length == -1 else length))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        return True


@dataclass
class Hub:
    """A hub on a free port of this machine that serves the files of ``folder``."""

    folder: Path
    url: str = ""
    # Of each request: file, range and token.
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    # Answers a request for a file instead, and says whether it did.
    misbehave: Callable[[Handler, str, bytes | None], bool] = lambda *_: False
    closing: threading.Event = field(default_factory=threading.Event)

    def files_asked(self) -> list[str]:
        return sorted(name for name, _, _ in self.asked)


@pytest.fixture
def start_hub() -> Iterator[Callable[[Path], Hub]]:
    """Start hubs, and stop them when the test is over."""
    stops: list[Callable[[], None]] = []

    def start(folder: Path) -> Hub:
        hub = Hub(folder)
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def stop() -> None:
            hub.closing.set()
            server.shutdown()
            server.server_close()
            thread.join()

        stops.append(stop)
        return hub

    yield start
    for stop in stops:
        stop()


@pytest.fixture
def hub(start_hub: Callable[[Path], Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub that the client asks; it has a model in two files."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    folder = tmp_path / "served"
    folder.mkdir()
    save_file(
        {"a": np.zeros((3, 4), dtype=np.float16), "b": np.zeros(7, dtype=np.int8)}, folder / "one.safetensors"
    )
    save_file({"c": np.zeros((100, 1000), dtype=np.float32)}, folder / SECOND_FILE)
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": SECOND_FILE}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    hub = start_hub(folder)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # would ask the real hub
    return hub


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """The cache's folder of the commit; it has a config alone."""
    folder = tmp_path / "models--owner--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def one_file(hub: Hub) -> Path:
    """Leave the hub a model of one file."""
    (hub.folder / INDEX_FILE).unlink()
    return (hub.folder / SECOND_FILE).rename(hub.folder / SINGLE_FILE)


def refusal(snapshot: Path) -> IserveError:
    """The one line that it ends in; nothing is kept."""
    with pytest.raises(IserveError) as caught:
        hub_tensors(MODEL, snapshot)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not list(snapshot.parents[1].rglob("*.json"))
    return caught.value


# --- what is read ---


def test_a_model_in_files_is_what_its_files_say(hub: Hub, snapshot: Path) -> None:
    assert hub_tensors(MODEL, snapshot) == stored_tensors(hub.folder)
    assert hub.files_asked() == sorted([INDEX_FILE, "one.safetensors", SECOND_FILE])


def test_a_model_in_one_file_is_what_the_file_says(hub: Hub, snapshot: Path) -> None:
    one_file(hub)
    assert hub_tensors(MODEL, snapshot) == {"c": StoredTensor("F32", (100, 1000))}


def test_no_more_than_the_header_is_asked_for(hub: Hub, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some bytes at first, then the rest of a header that is longer."""
    file = one_file(hub)
    header_end = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    monkeypatch.setattr(module, "FIRST_BYTES", 20)
    assert hub_tensors(MODEL, snapshot) == stored_tensors(hub.folder)
    ranges = [given for name, given, _ in hub.asked if name == SINGLE_FILE]
    assert ranges == ["bytes=0-19", f"bytes=20-{header_end - 1}"]


def test_a_hub_without_ranges_is_left_when_there_is_enough(
    hub: Hub, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_BYTES", 20)
    file = one_file(hub)
    expected = stored_tensors(hub.folder)
    file.write_bytes(file.read_bytes()[:-400_000])

    def all_of_it(handler: Handler, name: str, body: bytes | None) -> bool:
        if body is None:
            return False
        handler.answer(200, body, length=len(body) + 400_000)  # and the weights never arrive
        hub.closing.wait()
        return True

    hub.misbehave = all_of_it
    assert hub_tensors(MODEL, snapshot) == expected


def test_a_second_time_nothing_is_asked(hub: Hub, snapshot: Path) -> None:
    first = hub_tensors(MODEL, snapshot)
    hub.asked.clear()
    assert hub_tensors(MODEL, snapshot) == first
    assert hub.asked == []
    other = snapshot.with_name("f" * 40)
    assert hub_tensors(MODEL, other) == first
    assert hub.asked != []  # another commit


@pytest.mark.parametrize("content", [b"", b"{", b'{"version":0,"tensors":{}}', b"[1]", b"\xff"])
def test_what_was_kept_and_cannot_be_read_is_asked_for_again(hub: Hub, snapshot: Path, content: bytes) -> None:
    first = hub_tensors(MODEL, snapshot)
    (kept,) = snapshot.parents[1].rglob("*.json")
    kept.write_bytes(content)
    assert hub_tensors(MODEL, snapshot) == first
    assert kept.read_bytes() != content


def test_a_cache_that_cannot_be_written_is_done_without(hub: Hub, snapshot: Path) -> None:
    (snapshot.parents[1] / "iserve-tensors").write_text("in the way")
    assert hub_tensors(MODEL, snapshot) == stored_tensors(hub.folder)


def test_a_model_without_safetensors_has_no_tensors(hub: Hub, snapshot: Path) -> None:
    (hub.folder / INDEX_FILE).unlink()
    assert hub_tensors(MODEL, snapshot) is None


# --- redirects ---


def test_the_token_goes_to_the_hub_alone(
    hub: Hub, start_hub: Callable[[Path], Hub], snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of large files that the hub redirects to does not get the token."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    large_files = start_hub(hub.folder)

    def redirect(handler: Handler, name: str, body: bytes | None) -> bool:
        return name.endswith(".safetensors") and handler.answer(302, Location=f"{large_files.url}/{name}")

    hub.misbehave = redirect
    assert hub_tensors(MODEL, snapshot) == stored_tensors(hub.folder)
    assert {token for _, _, token in hub.asked} == {"Bearer hf_secret"}
    assert {token for _, _, token in large_files.asked} == {None}
    assert large_files.files_asked() == [SECOND_FILE, "one.safetensors"]


def test_a_redirect_is_followed_without_reading_what_comes_with_it(hub: Hub, snapshot: Path) -> None:
    def redirect(handler: Handler, name: str, body: bytes | None) -> bool:
        if handler.path.startswith("/there/"):
            return False
        handler.answer(307, b"moved", length=2**50, Location=f"/there/{name}")
        hub.closing.wait()  # the rest never arrives
        return True

    hub.misbehave = redirect
    assert hub_tensors(MODEL, snapshot) == stored_tensors(hub.folder)


def test_a_redirect_without_end_is_one_line(hub: Hub, snapshot: Path, golden: Golden) -> None:
    hub.misbehave = lambda handler, name, body: handler.answer(302, Location=handler.path)
    golden("controller", str(refusal(snapshot)))
    assert len(hub.asked) == 6


# --- hubs that misbehave ---


def half(handler: Handler, body: bytes) -> bool:
    handler.answer(206, body[:30], length=len(body), Content_Range=f"bytes 0-{len(body) - 1}/{len(body)}")
    handler.close_connection = True
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misbehave", "error"),
    [
        pytest.param(half, UnavailableError, id="half"),
        pytest.param(
            lambda handler, body: handler.answer(206, body[:30], Content_Range=f"bytes 0-29/{len(body)}"),
            UnavailableError,
            id="fewer bytes than asked",
        ),
        pytest.param(
            lambda handler, body: handler.answer(206, body, Content_Range=f"bytes 8-{len(body) - 1}/{len(body)}"),
            UnavailableError,
            id="another range",
        ),
        pytest.param(
            lambda handler, body: handler.answer(206, body, Content_Range="bytes */*"),
            UnavailableError,
            id="no range",
        ),
        pytest.param(
            lambda handler, body: handler.answer(
                206, body, Content_Range=f"bytes 0-{len(body) - 1}/{len(body) + 9}"
            ),
            CheckpointError,
            id="a size that is not true",
        ),
        pytest.param(lambda handler, body: handler.answer(206, body), UnavailableError, id="no Content-Range"),
        pytest.param(
            lambda handler, body: handler.answer(200, body, length=None), UnavailableError, id="no length"
        ),
        pytest.param(
            lambda handler, body: handler.answer(200, b"<!DOCTYPE html>", Content_Type="text/html; charset=utf-8"),
            UnavailableError,
            id="HTML",
        ),
        pytest.param(
            lambda handler, body: handler.answer(200, b"<!DOCTYPE html>"),
            CheckpointError,
            id="HTML that is not said to be",
        ),
        pytest.param(
            lambda handler, body: handler.answer(200, b"\x1f\x8b", Content_Encoding="gzip"),
            UnavailableError,
            id="compressed",
        ),
        pytest.param(
            lambda handler, body: handler.answer(200, b"version https://git-lfs.github.com/spec/v1"),
            CheckpointError,
            id="pointer",
        ),
        pytest.param(
            lambda handler, body: handler.answer(200, (2**62).to_bytes(8, "little")),
            CheckpointError,
            id="a length that lies",
        ),
        pytest.param(lambda handler, body: handler.answer(200), CheckpointError, id="nothing"),
        pytest.param(
            lambda handler, body: handler.answer(416, Content_Range="bytes */0"), CheckpointError, id="416"
        ),
        pytest.param(lambda handler, body: handler.answer(401, X_Error_Code="GatedRepo"), NotFoundError, id="401"),
        pytest.param(lambda handler, body: handler.answer(403, X_Error_Code="GatedRepo"), NotFoundError, id="403"),
        pytest.param(
            lambda handler, body: handler.answer(404, X_Error_Code="RevisionNotFound"),
            NotFoundError,
            id="commit gone",
        ),
        pytest.param(lambda handler, body: handler.answer(429, b"slow down"), UnavailableError, id="429"),
        pytest.param(lambda handler, body: handler.answer(503), UnavailableError, id="503"),
        pytest.param(
            lambda handler, body: handler.answer(302, Location="ftp://elsewhere/x"),
            UnavailableError,
            id="redirected to another protocol",
        ),
        pytest.param(
            lambda handler, body: bool(handler.wfile.write(b"SSH-2.0-OpenSSH\r\n")),
            UnavailableError,
            id="not HTTP",
        ),
    ],
)
def test_a_hub_that_misbehaves_is_one_line(
    hub: Hub, snapshot: Path, misbehave: Callable[[Handler, bytes], bool], error: type[IserveError], golden: Golden
) -> None:
    """The hub misbehaves for one of the files; it sends the index and the rest as it should."""
    hub.misbehave = lambda handler, name, body: name == SECOND_FILE and misbehave(handler, body or b"")
    found = refusal(snapshot)
    assert type(found) is error
    golden("controller", str(found))


def test_a_file_that_the_index_names_must_be_on_the_hub(hub: Hub, snapshot: Path, golden: Golden) -> None:
    (hub.folder / SECOND_FILE).unlink()
    found = refusal(snapshot)
    assert type(found) is CheckpointError
    golden("controller", str(found))


def test_a_tensor_must_be_where_the_hubs_index_says(hub: Hub, snapshot: Path, golden: Golden) -> None:
    index = {"weight_map": {"a": "one.safetensors", "lost": SECOND_FILE}}
    (hub.folder / INDEX_FILE).write_text(json.dumps(index))
    golden("controller", str(refusal(snapshot)))


def test_an_index_that_leads_elsewhere_is_not_followed(hub: Hub, snapshot: Path, golden: Golden) -> None:
    (hub.folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../../other/one.safetensors"}}))
    golden("controller", str(refusal(snapshot)))
    assert hub.files_asked() == [INDEX_FILE]


@pytest.mark.parametrize("stalled", [INDEX_FILE, "one.safetensors"])
def test_a_hub_that_never_answers_is_not_waited_for(
    hub: Hub, snapshot: Path, monkeypatch: pytest.MonkeyPatch, stalled: str
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.2)
    hub.misbehave = lambda handler, name, body: name == stalled and hub.closing.wait()
    assert type(refusal(snapshot)) is UnavailableError


@pytest.mark.parametrize("phase", ["headers", "body"])
def test_a_hub_that_drips_headers_is_left(
    hub: Hub, snapshot: Path, monkeypatch: pytest.MonkeyPatch, phase: str, golden: Golden
) -> None:
    """Each byte is in time, all of them never are."""
    monkeypatch.setattr(module, "TOTAL_TIMEOUT_S", 1.0)

    def drip(handler: Handler, name: str, body: bytes | None) -> bool:
        if phase == "body":
            handler.answer(206, length=10**6, Content_Range=f"bytes 0-{10**6 - 1}/{10**6}")
        else:
            handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nX-Long: ")
        while not hub.closing.wait(0.05):
            handler.wfile.write(b"x")
        return True

    hub.misbehave = drip
    found = refusal(snapshot)
    assert type(found) is UnavailableError
    golden("controller", str(found))


def test_more_files_or_bytes_than_any_model_has_are_not_read(
    hub: Hub, snapshot: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 1)
    golden("controller", str(refusal(snapshot)))
    monkeypatch.setattr(module, "MAX_FILES", 2)
    monkeypatch.setattr(module, "MAX_BYTES", 200)
    said = str(refusal(snapshot))
    file = said.partition(" ")[0]  # any of them: they are asked for at once
    assert file.endswith(".safetensors")
    golden.hide(file, "FILE")
    golden("controller", said)


def test_an_index_without_end_is_not_read(
    hub: Hub, snapshot: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    for place in (module, safetensors_header):
        monkeypatch.setattr(place, "MAX_INDEX_BYTES", 1000)

    def endless(handler: Handler, name: str, body: bytes | None) -> bool:
        handler.answer(200, length=None)
        while not hub.closing.is_set():
            handler.wfile.write(b" " * 2**16)
        return True

    hub.misbehave = endless
    golden("controller", str(refusal(snapshot)))


def test_offline_mode_is_named(hub: Hub, snapshot: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    golden("controller", str(refusal(snapshot)))
    assert hub.asked == []


def test_a_hub_that_is_not_there_is_named(snapshot: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    template: Any = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    assert type(refusal(snapshot)) is UnavailableError
