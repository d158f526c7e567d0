"""Architectures of vLLM's releases: recorded from their wheels, read again, and asked of an installation."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engines.registry import get_engine
from daemon.engines.vllm import adapter
from daemon.engines.vllm.adapter import VllmEngine
from daemon.engines.vllm.architectures import architectures_of, recorded_registry
from daemon.engines.vllm.capabilities import TABLE
from daemon.engines.vllm.model_registry import REGISTRY_FILE, Registered, Registry, read_registry, registry_digest
from daemon.engines.vllm.release import NEWEST
from daemon.sources import source_cache
from daemon.sources.transformers_classes import MAPPINGS_FILE, ModelClass, Transformers, recorded_transformers
from fingerprint.config import DeploymentConfig
from fingerprint.errors import EngineError
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from tests.daemon.engines.standin import make_editable, make_vllm, set_version
from tests.daemon.engines.vllm_architectures import REGISTRY, TRANSFORMERS, published, written
from tests.daemon.engines.vllm_releases import recorded as recorded_facts
from tests.daemon.engines.vllm_releases import recorded_registries
from tests.daemon.engines.vllm_sources import write_registry
from tests.daemon.engines.vllm_worker_spec import LLAMA_8B
from tests.golden_words import Golden

RELEASES = recorded_registries()
CLASSES = recorded_transformers()
RAN = {"0.24.0", "0.26.0", "0.33.0"}  # docs/decisions/0025
# Read by hand in the sources of 0.24, before a program read them.
TAKE_ADAPTERS = {"Gemma2", "Gemma3", "GptOss", "Llama", "Mistral", "Mixtral", "OPT", "Phi3", "Qwen2", "Qwen2Moe"}
TAKE_ADAPTERS |= {"Qwen3", "Qwen3Moe", "Arcee", "Apertus", "Cohere", "Ernie4_5", "Gemma", "Glm", "Glm4", "Granite"}
TAKE_ADAPTERS |= {"GPTBigCode", "Olmo", "Olmo2", "Phi", "SeedOss"}
TAKE_NONE = {"FalconForCausalLM", "GPTJForCausalLM", "GPT2LMHeadModel", "StableLmForCausalLM"}
BY_TRANSFORMERS_SINCE = {"Starcoder2ForCausalLM": 25, "GPTNeoXForCausalLM": 32}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("ISERVE_HOME", str(folder))
    return folder


@pytest.fixture
def python(tmp_path, monkeypatch) -> Path:
    """An environment with a stand-in of 0.31.0, whose registry is that release's."""
    made = make_vllm(tmp_path / "env", "0.31.0")
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(made))
    return made


def packages_of(python: Path) -> Path:
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return packages


class TestReleases:
    """Ten recorded releases, both ways: what they list is run, and nothing else."""

    @pytest.mark.parametrize("version", RELEASES)
    def test_what_it_lists_to_generate_text_is_run_and_the_rest_refused(self, version, golden: Golden):
        registry = RELEASES[version]
        table = architectures_of(registry, CLASSES)
        assert table.source == f"vLLM {version}"
        assert registry.text.keys() <= table.listed.keys()
        assert not {name for name in registry.text if table.listed[name].note}
        golden("engines", sorted({table.refusal(name) or "none" for name in registry.others}))
        by_backend = table.listed.keys() - registry.text.keys()
        for name in by_backend:
            found = CLASSES.classes[name]
            assert found.takes_attention or found.sets_attention
        golden("engines", sorted({table.listed[name].note or "none" for name in by_backend}), "by its backend")
        for name in (registry.removed.keys() | registry.plugins.keys()) - table.listed.keys():
            assert "no more" in (table.refusal(name) or "") or "plug-in" in (table.refusal(name) or "")
        for name, found in CLASSES.classes.items():
            if name not in table.listed:
                assert found.stateful or not (found.takes_attention or found.sets_attention)

    @pytest.mark.parametrize("version", RELEASES)
    def test_its_names_are_those_that_the_contract_reads(self, version):
        """Every key of every table of the file, read in another way; two are of the file that it keeps."""
        registry = RELEASES[version]
        names = {*registry.text, *registry.others, *registry.removed, *registry.plugins}
        assert names == set(recorded_facts()[version].architectures) - {"hash", "modelinfo"}

    @pytest.mark.parametrize("version", sorted(RAN))
    def test_what_we_ran_is_listed_by_the_releases_that_ran(self, version):
        families = {family for run in TABLE.verified for family in run.families or ()}
        ran = {name for name, found in CLASSES.classes.items() if families & set(found.families)}
        assert len(families) >= 5
        assert ran <= RELEASES[version].text.keys()

    @pytest.mark.parametrize("version", RELEASES)
    def test_adapters_are_taken_by_the_classes_that_were_read_by_hand(self, version):
        minor = int(version.split(".")[1])
        text = RELEASES[version].text
        table = architectures_of(RELEASES[version], CLASSES)
        assert {name for name in TAKE_ADAPTERS if table.listed[f"{name}ForCausalLM"].no_lora} == set()
        assert {name for name in TAKE_NONE if table.listed[name].no_lora is None} == set()
        for name, since in BY_TRANSFORMERS_SINCE.items():
            assert text[name].by_transformers == (minor >= since)
            assert (table.listed[name].no_lora is None) == (minor >= since)

    def test_a_class_of_transformers_without_a_plan_is_not_split(self):
        for version, registry in RELEASES.items():
            table = architectures_of(registry, CLASSES)
            big_code = registry.text["GPTBigCodeForCausalLM"]
            assert (table.listed["GPTBigCodeForCausalLM"].no_tp is not None) == big_code.by_transformers, version
            assert table.listed["Starcoder2ForCausalLM"].no_tp is None, version

    def test_the_newest_counts_as_its_file_does(self):
        """Keys of the tables for text, for several inputs, and for the Transformers backend."""
        text = RELEASES["0.33.0"].text.values()
        own = [one for one in text if not one.by_transformers]
        assert sum(not one.multimodal for one in own) == 124
        assert sum(one.multimodal for one in own) == 127
        assert len(text) - len(own) == 20 + 3

    def test_interfaces_are_told_for_every_class(self):
        untold = {
            (version, name)
            for version, registry in RELEASES.items()
            for name, one in registry.text.items()
            if None in (one.lora, one.pp)
        }
        assert untold == set()


class TestData:
    """The file that plans are made with where no vLLM is installed."""

    def test_it_is_the_newest_release_as_recorded(self):
        assert recorded_registry() == RELEASES[NEWEST]
        assert recorded_registry().version == NEWEST

    def test_it_is_written_as_the_recorder_writes_it(self):
        assert REGISTRY.read_text() == written(recorded_registry())
        assert TRANSFORMERS.read_text() == written(recorded_transformers())

    @pytest.mark.long
    def test_it_is_what_the_published_packages_say(self, tmp_path):
        try:
            found = published(tmp_path)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"the packages cannot be downloaded: {error.stderr.decode()[-200:]}")
        assert found == (recorded_registry(), recorded_transformers())


class TestReading:
    @pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
    def test_what_is_written_as_python_is_read_as_it_was(self, tmp_path, version):
        write_registry(RELEASES[version], tmp_path / "vllm")
        found = read_registry(tmp_path / "vllm", version)
        assert found == replace(RELEASES[version], digest=found.digest)
        assert registry_digest(tmp_path / "vllm") == found.digest != RELEASES[version].digest

    def test_what_a_class_derives_from_without_its_source_is_not_told(self, tmp_path):
        untold = Registered(lora=True, pp=None)
        write_registry(replace(RELEASES["0.33.0"], text={"XForCausalLM": untold}), tmp_path / "vllm")
        found = read_registry(tmp_path / "vllm", "1").text["XForCausalLM"]
        assert found == untold
        table = architectures_of(replace(RELEASES["0.33.0"], text={"XForCausalLM": found}), CLASSES)
        assert table.listed["XForCausalLM"].no_pp is None  # it is tried

    @pytest.mark.parametrize(
        "text",
        [
            pytest.param(None, id="absent"),
            pytest.param("", id="empty"),
            pytest.param("def (", id="no-python"),
            pytest.param("_TEXT_GENERATION_MODELS = load()\n", id="another-form"),
            pytest.param("_TEXT_GENERATION_MODELS = {'A': make('a')}\n", id="no-literals"),
            pytest.param("_TEXT_GENERATION_MODELS = {1: ('a', 'A'), 'B': ('b', 'B')}\n", id="no-names"),
            pytest.param("_TEXT_GENERATION_MODELS = {'A': {[]: 1}}\n", id="no-value"),
            pytest.param("x = " + "[" * 5000 + "]" * 5000, id="too-deep"),
            pytest.param("\0", id="no-text"),
        ],
    )
    def test_a_registry_of_another_form_is_an_error_that_names_the_file(self, tmp_path, text):
        file = tmp_path / "vllm" / REGISTRY_FILE
        if text is not None:
            file.parent.mkdir(parents=True)
            file.write_text(text)
        with pytest.raises(EngineError, match=r"registry\.py") as caught:
            read_registry(tmp_path / "vllm", "0.40.0")
        assert len(str(caught.value).splitlines()) == 1


def a_class(**flags: bool) -> Transformers:
    return Transformers(version="9.9.9", classes={"NewForCausalLM": ModelClass(families=("new",), **flags)})


class TestTheBackendForTransformers:
    """vLLM's own rule: a class whose attention can be replaced is taken, whichever project it is from."""

    @pytest.mark.parametrize("flags", [{"takes_attention": True}, {"sets_attention": True}], ids=str)
    def test_a_class_with_the_interface_is_run_with_a_note(self, flags, golden: Golden):
        table = architectures_of(RELEASES["0.33.0"], a_class(**flags))
        found = table.listed["NewForCausalLM"]
        golden("engines", found.note)
        golden("engines", found.no_tp or "")
        assert (
            architectures_of(RELEASES["0.33.0"], a_class(tp_plan=True, **flags)).listed["NewForCausalLM"].no_tp
            is None
        )

    def test_a_plan_says_that_it_was_not_run(self, golden: Golden):
        gpu, config = gpu_spec("h200-sxm"), DeploymentConfig(engine="vllm")
        helium = replace(read_spec(LLAMA_8B), family="helium", architecture="HeliumForCausalLM")
        assert TABLE.refusal(helium, config, gpu) is None
        golden("engines", TABLE.unseen(helium, config, gpu))
        assert TABLE.architectures.listed["HeliumForCausalLM"].note in TABLE.conditions(helium, config, gpu)

    def test_one_without_it_is_refused_in_vllm_s_words(self, golden: Golden):
        said = architectures_of(RELEASES["0.33.0"], a_class()).refusal("NewForCausalLM")
        golden("engines", said)
        stated = recorded_facts()["0.33.0"].texts
        assert {"The Transformers implementation of ", " is not compatible with vLLM"} <= set(stated)

    def test_a_class_with_a_state_is_refused(self, golden: Golden):
        said = architectures_of(RELEASES["0.33.0"], a_class(sets_attention=True, stateful=True)).refusal(
            "NewForCausalLM"
        )
        golden("engines", said or "")

    def test_a_release_without_the_backend_runs_what_it_lists_alone(self, golden: Golden):
        table = architectures_of(replace(RELEASES["0.33.0"], backend=None), a_class(takes_attention=True))
        assert table.listed.keys() == RELEASES["0.33.0"].text.keys()
        golden("engines", table.refusal("NewForCausalLM") or "")
        assert "not compatible" not in (table.refusal("NewForCausalLM") or "")

    def test_an_unknown_name_is_refused_with_the_nearest_that_are_known(self, golden: Golden):
        said = TABLE.architectures.refusal("Qwen3NextMoeForCausalLM") or ""
        golden("engines", said)
        assert TABLE.architectures.refusal("x" * 100_000) is not None


class TestInstallations:
    """An installed vLLM is asked, not the file."""

    def test_it_tells_what_its_own_release_lists(self, home, python):
        table = get_engine("vllm").capabilities()
        expected = architectures_of(RELEASES["0.31.0"], CLASSES)
        assert table.architectures.source == "vLLM 0.31.0"
        assert table.architectures.listed == expected.listed
        newer = RELEASES["0.33.0"].text.keys() - RELEASES["0.31.0"].text.keys() - CLASSES.classes.keys()
        assert newer
        assert all("not list it" in (table.architectures.refusal(name) or "") for name in newer)

    def test_what_it_lists_and_nobody_ran_is_planned_with_a_note(self, home, python, golden: Golden):
        table = get_engine("vllm").capabilities()
        spec, gpu = read_spec(LLAMA_8B), gpu_spec("h200-sxm")
        config = DeploymentConfig(engine="vllm")
        assert table.unseen(spec, config, gpu) is None
        other = replace(spec, family="deepseek_v3", architecture="DeepseekV3ForCausalLM")
        assert table.refusal(other, replace(config, tp=8, pp=2), gpu) is None
        golden("engines", table.unseen(other, config, gpu))

    def test_it_is_read_once_and_again_when_another_is_installed_there(self, home, python, monkeypatch):
        readings = []

        def read(package: Path, version: str) -> Registry:
            readings.append(version)
            return read_registry(package, version)

        monkeypatch.setattr(adapter, "read_registry", read)
        for _ in range(2):
            source_cache._kept.cache_clear()  # as another process
            assert get_engine("vllm").capabilities().architectures.source == "vLLM 0.31.0"
        assert readings == ["0.31.0"]
        set_version(packages_of(python), "vllm", "0.28.0")
        write_registry(RELEASES["0.28.0"], packages_of(python) / "vllm")
        table = get_engine("vllm").capabilities()
        assert readings == ["0.31.0", "0.28.0"]
        assert table.architectures.source == "vLLM 0.28.0"
        assert table.architectures.listed == architectures_of(RELEASES["0.28.0"], CLASSES).listed

    def test_the_newest_release_as_it_is_published_is_not_read_at_all(self, home, tmp_path, monkeypatch):
        python = make_vllm(tmp_path / "newest", NEWEST)
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(python))
        digest = registry_digest(packages_of(python) / "vllm")
        known = replace(recorded_registry(), digest=digest)
        monkeypatch.setattr(adapter, "recorded_registry", lambda: known)
        monkeypatch.setattr(adapter, "read_registry", None)
        assert get_engine("vllm").capabilities().architectures == TABLE.architectures
        make_editable(python, "vllm", tmp_path / "sources")  # its classes may be different
        with pytest.raises(TypeError, match="not callable"):
            adapter._registry(VllmEngine().interpreter.find())

    def test_one_that_cannot_be_read_is_said_and_the_file_stands_in(self, home, python, golden: Golden):
        (packages_of(python) / "vllm" / REGISTRY_FILE).write_text("_TEXT_GENERATION_MODELS = load()\n")
        table = get_engine("vllm").capabilities()
        assert table.deployable
        assert table.architectures == TABLE.architectures
        said = [note.text for note in table.notes if "registry.py" in note.text]
        assert len(said) == 1
        golden("engines", said[0])
        assert "\n" not in said[0]

    def test_its_own_transformers_answer_for_the_backend(self, home, python, golden: Golden):
        package = packages_of(python) / "transformers"
        (package / MAPPINGS_FILE).parent.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / MAPPINGS_FILE).write_text(
            'MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict([("new", "NewForCausalLM")])\n'
        )
        (package / "models" / "new").mkdir()
        (package / "models" / "new" / "modeling_new.py").write_text(
            "class NewPreTrainedModel(PreTrainedModel):\n    _supports_attention_backend = True\n\n"
            "class NewForCausalLM(NewPreTrainedModel, GenerationMixin):\n    pass\n"
        )
        set_version(packages_of(python), "transformers", "9.9.9")
        table = get_engine("vllm").capabilities().architectures
        golden("engines", table.listed["NewForCausalLM"].note or "")
        assert "HeliumForCausalLM" not in table.listed
        (package / MAPPINGS_FILE).write_text("")
        table = get_engine("vllm").capabilities()
        assert "HeliumForCausalLM" in table.architectures.listed
        golden("engines", [note.text for note in table.notes], "notes")


def test_the_file_is_small_enough_to_be_read_for_every_plan():
    assert len(json.loads(REGISTRY.read_text())["text"]) == len(recorded_registry().text)
    assert REGISTRY.stat().st_size + TRANSFORMERS.stat().st_size < 200_000
