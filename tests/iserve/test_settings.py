"""Settings: every fault is named at once, and a child process reads what its parent had."""

from __future__ import annotations

from pathlib import Path

import pytest

from fingerprint.errors import ConfigError
from iserve.planning.pipeline import PlanOptions
from iserve.settings import Settings, load_settings, setting_rows
from placement.policies import DEFAULT_LOAD_THRESHOLD
from tests.golden_words import Golden


def test_defaults_without_any_variable() -> None:
    settings = load_settings({})
    assert (settings.host, settings.port, settings.api_port) == ("127.0.0.1", 8080, 8081)
    assert not settings.keys_required


def test_who_says_nothing_of_the_threshold_has_placements_everywhere() -> None:
    """Else a report would be of other plans than those that are made."""
    defaults = (Settings().load_threshold, PlanOptions().load_threshold)
    assert set(defaults) == {DEFAULT_LOAD_THRESHOLD}


def test_values_are_read() -> None:
    settings = load_settings({"ISERVE_HOME": "/srv/iserve", "ISERVE_PORT": "9000", "ISERVE_CPU_DEVICES": "3"})
    assert (settings.home, settings.port, settings.cpu_devices) == (Path("/srv/iserve"), 9000, 3)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::"])
def test_keys_are_required_beyond_loopback(host: str) -> None:
    assert load_settings({"ISERVE_HOST": host}).keys_required
    assert not load_settings({"ISERVE_HOST": host, "ISERVE_REQUIRE_KEYS": "no"}).keys_required


def test_folders_of_models_are_several_absolute_paths_and_a_child_reads_the_same(golden: Golden) -> None:
    settings = load_settings({"ISERVE_MODEL_FOLDERS": "/srv/models:/data/more models"})
    assert settings.model_folders == (Path("/srv/models"), Path("/data/more models"))
    assert load_settings(settings.environment()) == settings
    for wrong in ("models", "/srv/models:models", ":", "~/models"):
        with golden.raises("controller", ConfigError):
            load_settings({"ISERVE_MODEL_FOLDERS": wrong})


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"ISERVE_PROT": "1", "ISERVE_PORT": "many", "ISERVE_REQUIRE_KEYS": "perhaps"})
    for name in ("ISERVE_PROT", "ISERVE_PORT='many'", "ISERVE_REQUIRE_KEYS='perhaps'"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("HOME", ""), ("HOST", " "), ("PORT", ""), ("HOME", "~no-such-user/x")]
)
def test_a_value_that_says_nothing_is_refused(name: str, value: str) -> None:
    """An empty home would be the current folder, an empty host every address of the machine."""
    with pytest.raises(ConfigError, match=f"ISERVE_{name}="):
        load_settings({f"ISERVE_{name}": value})


def test_the_home_is_the_same_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings({"ISERVE_HOME": "home"}).home == tmp_path / "home"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "70000"),
        ("CPU_DEVICES", "0"),
        ("CPU_DEVICES", "65"),
        ("LOAD_THRESHOLD", "1.5"),
        ("PROFILE_SECONDS", "-1"),
        ("API_PORT", "8080"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        load_settings({f"ISERVE_{name}": value})


def test_a_child_reads_the_same_settings(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, port=1234, api_port=1235, cpu_devices=2, require_keys=True)
    assert load_settings(settings.environment()) == settings


def test_the_state_is_in_the_home_or_where_a_url_says(tmp_path: Path) -> None:
    assert Settings(home=tmp_path).state == tmp_path / "state.db"
    url = "postgresql://iserve:secret@db/iserve"
    settings = load_settings({"ISERVE_HOME": str(tmp_path), "ISERVE_DATABASE_URL": url})
    assert settings.state == url
    assert load_settings(settings.environment()) == settings
    assert "secret" not in repr(settings)
    with pytest.raises(ConfigError, match="begin with postgresql://") as caught:
        load_settings({"ISERVE_DATABASE_URL": url.replace("postgresql", "mysql")})
    assert "secret" not in str(caught.value)


def test_both_ports_may_be_left_to_the_system() -> None:
    assert load_settings({"ISERVE_PORT": "0", "ISERVE_API_PORT": "0"}).port == 0


def test_the_reference_names_every_setting_with_what_it_takes_and_means() -> None:
    rows = {row.variable: row for row in setting_rows()}
    assert rows.keys() == set(Settings().environment()) | {
        "ISERVE_DATABASE_URL",
        "ISERVE_CPU_DEVICES",
        "ISERVE_REQUIRE_KEYS",
        "ISERVE_MODEL_FOLDERS",
        "ISERVE_VLLM_ADAPTER_KERNELS",
        "ISERVE_VLLM_BACKGROUND_LOADS",
        "ISERVE_VLLM_DELTA_ARENA_MIB",
        "ISERVE_VLLM_PYTHON",
        "ISERVE_TENSORRT_LLM_PYTHON",
    }
    assert all(row.meaning for row in rows.values())
    assert (rows["ISERVE_PORT"].default, rows["ISERVE_PORT"].takes) == ("`8080`", "a whole number")
    assert rows["ISERVE_CPU_DEVICES"].default == "unset"
