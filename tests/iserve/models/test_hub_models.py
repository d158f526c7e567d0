"""Resolution of a Hugging Face id: a small hub of our own over real HTTP, and the client's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fingerprint.checkpoint import stored_tensors
from fingerprint.errors import CheckpointError, NotFoundError
from tests.fingerprint.small_checkpoints import write_llama, write_own
from tests.golden_words import Golden
from tests.iserve.models.fake_hub import COMMIT, Hub
from tests.waiting import PATIENCE_S


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_code_that_is_partly_cached_is_completed_or_named(
    hub: Hub, tmp_path: Path, in_new_process: Any, golden: Golden
) -> None:
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
    golden("controller", said)
    kind, said = in_new_process("owner/own", need_code=True, HF_HUB_OFFLINE="1")
    assert kind == "UnavailableError"
    golden("controller", said)
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
    hub: Hub, config_only: Path, in_new_process: Any, golden: Golden
) -> None:
    (config_only / "pytorch_model.bin").write_bytes(b"pickle")
    hub.models["owner/old"] = config_only
    kind, message = in_new_process("owner/old")
    assert kind == CheckpointError.__name__
    golden("controller", message)
    assert hub.files_got() == ["config.json"]


def test_a_model_that_neither_has_is_named(in_new_process: Any, golden: Golden) -> None:
    kind, message = in_new_process("owner/unknown")
    assert kind == NotFoundError.__name__
    golden("controller", message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("env", "status"),
    [
        pytest.param({"HF_HUB_OFFLINE": "1"}, 0, id="offline-mode"),
        pytest.param({"HF_ENDPOINT": "http://127.0.0.1:9"}, 0, id="refused"),
        pytest.param({"HF_ENDPOINT": "http://hub.invalid"}, 0, id="no-such-host"),
        pytest.param({}, 500, id="broken"),
    ],
)
def test_a_hub_that_does_not_answer_is_named(
    hub: Hub, in_new_process: Any, env: dict[str, str], status: int, golden: Golden
) -> None:
    hub.status = status
    kind, message = in_new_process("owner/tiny", **env)
    assert kind == "UnavailableError"
    golden("controller", message.partition(" ([Errno")[0])  # whose number is the resolver's
    assert "\n" not in message


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"[1]", b"{}", b'{"siblings": 7}'])
def test_what_is_no_hub_is_named(hub: Hub, in_new_process: Any, page: bytes, golden: Golden) -> None:
    """A network's login page, say."""
    hub.status, hub.page = 200, page
    kind, message = in_new_process("owner/tiny")
    assert kind == "UnavailableError"
    golden("controller", message)


@pytest.mark.slow
@pytest.mark.parametrize("drips", ["/api/models/owner/tiny", "/resolve/"])
def test_a_hub_that_drips_is_left(
    hub: Hub, checkpoint: Path, in_new_process: Any, drips: str, golden: Golden
) -> None:
    """Each byte is in time, all of them never are; the process ends all the same."""
    hub.models["owner/tiny"] = checkpoint
    hub.drips = drips
    kind, message = in_new_process("owner/tiny", first="import iserve.hub_files as h; h.CONFIG_TIMEOUT_S = 3.0\n")
    assert kind == "UnavailableError"
    golden("controller", message)


def test_a_model_without_config_is_named(hub: Hub, checkpoint: Path, in_new_process: Any, golden: Golden) -> None:
    (checkpoint / "config.json").unlink()
    hub.models["owner/tiny"] = checkpoint
    kind, message = in_new_process("owner/tiny")
    assert kind == "NotFoundError"
    golden("controller", message)
