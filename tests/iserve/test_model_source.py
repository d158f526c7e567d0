"""Resolution of a MODEL argument: names, directories, and a small hub of our own over real HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.checkpoint import stored_tensors
from fingerprint.errors import CheckpointError, ConfigError, NotFoundError, UnavailableError
from fingerprint.truncate import generate_dummy
from iserve.model_source import is_hub_id, resolve
from tests.fingerprint.small_checkpoints import write_llama, write_own
from tests.waiting import PATIENCE_S

TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def unprivileged(what: Callable[[], None]) -> None:
    """Run ``what`` as a user who cannot read everything: in a child process where this one is root."""
    if os.getuid():
        what()
        return
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            what()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("closed", ["folder", "config.json"])
def test_what_cannot_be_read_is_one_line(config_only: Path, closed: str) -> None:
    """A folder, or its config.json, belongs to another user."""
    for folder in config_only.parents:
        if folder.stat().st_mode & 0o005 != 0o005:  # pytest's own, closed to other users
            folder.chmod(0o755)
    target = config_only if closed == "folder" else config_only / "config.json"
    target.chmod(0)

    def ask() -> None:
        with pytest.raises(ConfigError, match=r"cannot read .*config\.json: Permission denied"):
            resolve(str(config_only), need_weights=False)

    try:
        unprivileged(ask)
    finally:
        target.chmod(0o755)


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A directory with only a config.json."""
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def checkpoint(config_only: Path, tmp_path: Path) -> Path:
    """A directory with weights."""
    generate_dummy(config_only, tmp_path / "tiny", 2)
    return tmp_path / "tiny"


# --- local ---


def test_a_checkpoint_directory(checkpoint: Path) -> None:
    source = resolve(str(checkpoint))
    assert (source.name, source.directory, source.has_weights) == ("tiny", checkpoint, True)
    assert source.spec.num_layers == 2


def test_a_config_alone_by_directory_or_file(config_only: Path) -> None:
    source = resolve(str(config_only))
    assert (source.name, source.has_weights) == ("shape", False)
    assert resolve(str(config_only / "config.json")) == source


def test_shards_count_as_weights_when_all_are_there(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert not resolve(str(checkpoint)).has_weights
    shutil.copy(checkpoint / "model-1.safetensors", checkpoint / "model-2.safetensors")
    assert resolve(str(checkpoint)).has_weights


def test_an_index_without_end_is_not_read(checkpoint: Path) -> None:
    """The index's presence counts; loading it reports what is wrong."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").touch()
    os.truncate(checkpoint / "model.safetensors.index.json", 2**40)
    assert resolve(str(checkpoint)).has_weights


def test_a_registered_name_comes_before_a_directory(
    checkpoint: Path, config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config_only.parent)
    assert resolve("shape").directory == config_only
    source = resolve("shape", {"shape": checkpoint})
    assert (source.name, source.directory) == ("shape", checkpoint)


def test_a_home_folder_is_expanded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert resolve("~/tiny").directory == checkpoint


@pytest.mark.parametrize(
    "name",
    ["", "./nowhere", "/no/where", "a/b/c", "a b", "../x", "a--b/c", "x" * 5000, "a\0b", "~nobody-here/x", "ü"],
)
def test_what_can_be_no_model_is_refused_without_asking_anyone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(NotFoundError, match="not a Hugging Face id") as caught:
        resolve(name)
    assert len(str(caught.value)) < 500


@given(st.from_regex(r"\A[A-Za-z0-9._/-]{1,12}\Z") | st.sampled_from(["Y.", "a/b-", "a.git", "x" * 96, "x" * 97]))
def test_what_is_taken_for_a_hub_id_is_one_for_the_hubs_client(model: str) -> None:
    """The client would else raise what no caller here expects."""
    from huggingface_hub.utils import validate_repo_id

    if is_hub_id(model):
        validate_repo_id(model)


def test_a_registered_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="which is gone; register it again"):
        resolve("mine", {"mine": tmp_path / "gone"})


def test_a_file_that_is_no_config_is_refused(checkpoint: Path) -> None:
    with pytest.raises(NotFoundError, match="is a file; give the model's directory"):
        resolve(str(checkpoint / "model.safetensors"))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_an_absurd_config_is_refused(config_only: Path) -> None:
    (config_only / "config.json").write_text(json.dumps(TINY | {"hidden_size": -16}))
    with pytest.raises(ConfigError, match="hidden_size must be an integer"):
        resolve(str(config_only))


# --- the hub ---


@dataclass
class Hub:
    """A hub that serves folders; ``asked`` holds the paths of all requests."""

    url: str = ""
    models: dict[str, Path] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    status: int = 0  # answer everything with this
    page: bytes = b""  # and this
    drips: str = ""  # paths with this in them are answered without end
    closing: threading.Event = field(default_factory=threading.Event)

    def files_got(self) -> list[str]:
        return sorted({path.rpartition("/")[2] for path in self.asked if "/resolve/" in path})


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    served = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def drip(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(10**6))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while not served.closing.wait(0.05):
                    self.wfile.write(b" ")

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            served.asked.append(path)
            if served.status:
                return self.answer(served.status, served.page)
            if served.drips and served.drips in path and self.command == "GET":
                return self.drip()
            for name, folder in served.models.items():
                if path.startswith(f"/api/models/{name}"):
                    return self.api(path, name, folder)
                if path.startswith(f"/{name}/resolve/"):
                    file = folder / path.rpartition("/")[2]
                    if not file.is_file():
                        return self.answer(404, X_Error_Code="EntryNotFound")
                    body = file.read_bytes()
                    tag = f'"{hashlib.sha1(body).hexdigest()}"'
                    return self.answer(200, body, ETag=tag, X_Repo_Commit=COMMIT)
            return self.answer(404, b"{}", X_Error_Code="RepoNotFound")

        def api(self, path: str, name: str, folder: Path) -> None:
            files = sorted(entry.name for entry in folder.iterdir())
            if "/tree/" in path:
                tree = [
                    {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": "0" * 40}
                    for file in files
                ]
                return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield served
    served.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def in_new_process(tmp_path: Path, hub: Hub) -> Any:
    """Resolves in a process of its own (the hub client reads its environment once): the error, or the fields."""
    code = (
        "import sys, json; from iserve.model_source import resolve; from fingerprint.errors import IserveError\n"
        "from iserve.hub_tensors import hub_tensors\n"
        "try: s = resolve(sys.argv[1], need_weights='1' in sys.argv[2], need_code='code' in sys.argv[2])\n"
        "except IserveError as e: print(json.dumps([type(e).__name__, str(e)]))\n"
        "else: print(json.dumps([s.name, str(s.directory), s.has_weights, s.spec.num_layers]\n"
        "    + [sorted(hub_tensors(s.name, s.directory) or ()) for _ in sys.argv[3:]]))"
    )

    def run(
        model: str,
        *,
        need_weights: bool = True,
        need_code: bool = False,
        tensors: bool = False,
        first: str = "",
        **env: str,
    ) -> list[Any]:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")},
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            **env,
        }
        needed = f"{int(need_weights)} {'code' if need_code else ''}"
        done = subprocess.run(
            [sys.executable, "-c", first + code, model, needed, *(["tensors"] if tensors else [])],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_from_the_hub_then_from_the_cache(hub: Hub, checkpoint: Path, in_new_process: Any) -> None:
    for name in ("tokenizer.json", "modeling_evil.py", "pytorch_model.bin", "training_args.bin", "README.md"):
        (checkpoint / name).write_text("{}")
    hub.models["owner/tiny"] = checkpoint
    name, directory, has_weights, num_layers = in_new_process("owner/tiny")
    assert (name, has_weights, num_layers) == ("owner/tiny", True, 2)
    assert hub.files_got() == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(directory) / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    hub.asked.clear()
    assert in_new_process("owner/tiny") == [name, directory, True, 2]
    assert hub.asked == []  # the cache answered alone


def test_a_plan_fetches_no_weights_and_a_deployment_fetches_them_later(
    hub: Hub, checkpoint: Path, in_new_process: Any
) -> None:
    hub.models["owner/tiny"] = checkpoint
    assert in_new_process("owner/tiny", need_weights=False)[2] is False
    assert hub.files_got() == ["config.json"]
    assert in_new_process("owner/tiny")[2] is True
    assert "model.safetensors" in hub.files_got()


def test_python_files_come_with_permission_only_and_from_the_commit_of_the_rest(
    hub: Hub, tmp_path: Path, in_new_process: Any
) -> None:
    folder = write_own(tmp_path / "own")
    hub.models["owner/own"] = folder
    _, directory, has_weights, _ = in_new_process("owner/own")
    assert has_weights
    assert not list(Path(directory).glob("*.py"))
    hub.asked.clear()
    assert in_new_process("owner/own", need_code=True)[1] == directory
    assert sorted(path.name for path in Path(directory).glob("*.py")) == [
        "configuration_own.py",
        "modeling_own.py",
    ]
    assert all(f"/{COMMIT}/" in path for path in hub.asked if path.endswith(".py"))
    hub.asked.clear()
    assert in_new_process("owner/own", need_code=True)[1] == directory
    assert (hub.asked, (folder / "ran").exists()) == ([], False)


def test_code_of_a_tokenizer_alone_comes_with_permission_too(
    hub: Hub, tmp_path: Path, in_new_process: Any
) -> None:
    folder = write_llama(tmp_path / "llama")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokens.Own", null]}}')
    (folder / "tokens.py").write_text("raise SystemExit\n")
    hub.models["owner/llama"] = folder
    directory = Path(in_new_process("owner/llama", need_code=True)[1])
    assert [path.name for path in directory.glob("*.py")] == ["tokens.py"]


def test_code_that_is_partly_cached_is_completed_or_named(hub: Hub, tmp_path: Path, in_new_process: Any) -> None:
    """A file that the named ones import was never fetched, or its download broke off."""
    folder = write_own(tmp_path / "own")
    (folder / "modeling_own.py").write_text("from .kernels import k\n")
    (folder / "kernels.py").write_text("raise SystemExit\n")
    hub.models["owner/own"] = folder
    directory = Path(in_new_process("owner/own", need_code=True)[1])
    (directory / "kernels.py").unlink()
    hub.status = 500
    kind, said = in_new_process("owner/own", need_code=True)
    assert kind == "UnavailableError"
    assert "cache has no kernels.py of owner/own, and the hub answered" in said
    kind, said = in_new_process("owner/own", need_code=True, HF_HUB_OFFLINE="1")
    assert kind == "UnavailableError"
    assert "offline mode is on (HF_HUB_OFFLINE); download it first" in said
    assert in_new_process("owner/own")[1] == str(directory)  # planned without
    hub.status = 0
    assert in_new_process("owner/own", need_code=True)[1] == str(directory)
    assert (directory / "kernels.py").is_file()


def test_code_that_the_hub_has_not_is_named(hub: Hub, tmp_path: Path, in_new_process: Any) -> None:
    folder = write_own(tmp_path / "own")
    (folder / "modeling_own.py").unlink()
    hub.models["owner/own"] = folder
    kind, said = in_new_process("owner/own", need_code=True)
    assert (kind, "has no modeling_own.py" in said) == ("CheckpointError", True)


def test_a_plan_knows_the_tensors_without_the_weights(
    hub: Hub, checkpoint: Path, in_new_process: Any, tmp_path: Path
) -> None:
    """The header is read and no more, and that once."""
    hub.models["owner/tiny"] = checkpoint
    found = in_new_process("owner/tiny", need_weights=False, tensors=True)
    assert found[2] is False
    assert found[4] == sorted(stored_tensors(checkpoint))
    assert hub.files_got() == ["config.json", "model.safetensors", "model.safetensors.index.json"]
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    hub.asked.clear()
    assert in_new_process("owner/tiny", need_weights=False, tensors=True) == found
    assert hub.asked == []
    whole = in_new_process("owner/tiny", tensors=True)  # of the files, when they are here
    assert (whole[2], whole[4]) == (True, found[4])


def test_the_cache_of_the_hubs_client_stays_one(
    hub: Hub, checkpoint: Path, in_new_process: Any, tmp_path: Path
) -> None:
    """The client lists the model, and removes it with what is kept of its tensors."""
    from huggingface_hub import scan_cache_dir

    hub.models["owner/tiny"] = checkpoint
    in_new_process("owner/tiny", need_weights=False, tensors=True)
    (kept,) = (tmp_path / "hf").rglob("iserve-tensors/*")
    cache = scan_cache_dir(tmp_path / "hf" / "hub")
    assert not cache.warnings
    assert [repo.repo_id for repo in cache.repos] == ["owner/tiny"]
    cache.delete_revisions(COMMIT).execute()
    assert not kept.exists()


def test_an_unsupported_model_is_refused_before_its_weights(
    hub: Hub, checkpoint: Path, in_new_process: Any
) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "t5"}')
    hub.models["owner/tiny"] = checkpoint
    assert in_new_process("owner/tiny")[0] == "UnsupportedModelError"
    assert hub.files_got() == ["config.json"]


def test_a_pickle_only_model_is_refused_before_its_weights(
    hub: Hub, config_only: Path, in_new_process: Any
) -> None:
    (config_only / "pytorch_model.bin").write_bytes(b"pickle")
    hub.models["owner/old"] = config_only
    kind, message = in_new_process("owner/old")
    assert kind == CheckpointError.__name__
    assert "weights load from safetensors only; convert it" in message
    assert hub.files_got() == ["config.json"]


def test_a_model_that_neither_has_is_named(in_new_process: Any) -> None:
    kind, message = in_new_process("owner/unknown")
    assert kind == NotFoundError.__name__
    for part in ("no directory 'owner/unknown'", "cache has nothing complete of it", "the hub has no such model"):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("env", "status", "reason"),
    [
        pytest.param({"HF_HUB_OFFLINE": "1"}, 0, "offline mode is on", id="offline-mode"),
        pytest.param({"HF_ENDPOINT": "http://127.0.0.1:9"}, 0, "the hub cannot be reached", id="refused"),
        pytest.param({"HF_ENDPOINT": "http://hub.invalid"}, 0, "the hub cannot be reached", id="no-such-host"),
        pytest.param({}, 500, "the hub answered", id="broken"),
    ],
)
def test_a_hub_that_does_not_answer_is_named(
    hub: Hub, in_new_process: Any, env: dict[str, str], status: int, reason: str
) -> None:
    hub.status = status
    kind, message = in_new_process("owner/tiny", **env)
    assert kind == "UnavailableError"
    assert "cache has nothing complete of it" in message
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"[1]", b"{}", b'{"siblings": 7}'])
def test_what_is_no_hub_is_named(hub: Hub, in_new_process: Any, page: bytes) -> None:
    """A network's login page, say."""
    hub.status, hub.page = 200, page
    kind, message = in_new_process("owner/tiny")
    assert kind == "UnavailableError"
    assert "is no Hugging Face hub; is there a login page in the network, is HF_ENDPOINT right?" in message


@pytest.mark.parametrize("drips", ["/api/models/owner/tiny", "/resolve/"])
def test_a_hub_that_drips_is_left(hub: Hub, checkpoint: Path, in_new_process: Any, drips: str) -> None:
    """Each byte is in time, all of them never are; the process ends all the same."""
    hub.models["owner/tiny"] = checkpoint
    hub.drips = drips
    kind, message = in_new_process("owner/tiny", first="import iserve.hub_files as h; h.CONFIG_TIMEOUT_S = 3.0\n")
    assert kind == "UnavailableError"
    assert "no whole answer within 3 s" in message


def test_a_model_without_config_is_named(hub: Hub, checkpoint: Path, in_new_process: Any) -> None:
    (checkpoint / "config.json").unlink()
    hub.models["owner/tiny"] = checkpoint
    kind, message = in_new_process("owner/tiny")
    assert kind == "NotFoundError"
    assert "owner/tiny has no config.json on the hub" in message


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "iserve-dmo",
            "no registered model is named 'iserve-dmo' (did you mean iserve-demo?), there is no directory",
        ),
        (
            "nope",
            "no registered model is named 'nope' (registered: chat, iserve-demo), there is no directory 'nope'",
        ),
        ("owner/nope", "there is no directory 'owner/nope', the local Hugging Face cache"),
    ],
)
def test_a_model_that_is_not_here_is_told_what_is(monkeypatch: pytest.MonkeyPatch, model: str, said: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    registered = {"iserve-demo": Path("/nowhere"), "chat": Path("/nowhere")}
    with pytest.raises(UnavailableError) as caught:
        resolve(model, registered)
    assert str(caught.value).startswith(said)
