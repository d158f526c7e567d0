"""Environments with a stand-in for an engine that cannot run here: a real Python with real metadata."""

from __future__ import annotations

import json
import sys
import venv
from pathlib import Path

from tests.daemon.engines.vllm_releases import recorded_registries
from tests.daemon.engines.vllm_sources import write_registry

HERE = Path(__file__).parent


def make_environment(folder: Path, modules: dict[str, Path], distribution: str, version: str) -> Path:
    """A virtual environment in ``folder`` in which ``distribution`` is installed; returns its Python.

    Args:
        modules: the program's file by dotted module name, such as ``vllm.entrypoints.cli.main``.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name, source in modules.items():
        *parents, module = name.split(".")
        where = packages.joinpath(*parents)
        where.mkdir(parents=True, exist_ok=True)
        for depth in range(len(parents)):
            packages.joinpath(*parents[: depth + 1], "__init__.py").touch()
        (where / f"{module}.py").write_bytes(source.read_bytes())
    set_version(packages, distribution, version)
    return folder / "bin" / "python"


def set_version(packages: Path, distribution: str, version: str) -> None:
    """Have ``version`` of ``distribution`` installed in place of any other, as pip would leave it."""
    stem = distribution.replace("-", "_")
    for old in packages.glob(f"{stem}-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    info = packages / f"{stem}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def make_editable(python: Path, package: str, sources: Path) -> Path:
    """Have ``package`` installed as ``pip install -e`` leaves it, found by an import hook; returns its folder."""
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    sources.mkdir()
    folder = (packages / package).rename(sources / package)
    (info,) = packages.glob(f"{package}-*.dist-info")
    origin = {"url": sources.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    (packages / "editable_hook.py").write_text(
        "import sys\n"
        "from importlib.util import spec_from_file_location\n"
        "class Finder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        f"        if name == {package!r}:\n"
        f"            folder = {str(folder)!r}\n"
        "            where = folder + '/__init__.py'\n"
        "            return spec_from_file_location(name, where, submodule_search_locations=[folder])\n"
        "sys.meta_path.append(Finder)\n"
    )
    (packages / "editable_hook.pth").write_text("import editable_hook\n")
    return folder


def make_vllm(folder: Path, version: str = "0.24.0") -> Path:
    """An environment with the stand-in ``vllm``, its server and its ``LLM`` class; returns its Python."""
    stand_in = HERE / "vllm_stand_in"
    modules = {
        "vllm.entrypoints.cli.main": HERE / "vllm_standin.py",
        "vllm.__init__": stand_in / "package.py",
        "vllm.adapters": stand_in / "adapters.py",
        "vllm.answers": stand_in / "answers.py",
        "vllm.checks": stand_in / "checks.py",
        "vllm.deltas": stand_in / "deltas.py",
        "vllm.costs": stand_in / "costs.py",
        "vllm.envs": stand_in / "envs.py",
        "vllm.release": stand_in / "release.py",
        "vllm.routers": stand_in / "routers.py",
        "vllm.core": stand_in / "core.py",
        "vllm.llm": stand_in / "llm.py",
        "vllm.lora.request": stand_in / "lora_request.py",
        "vllm.compilation.breakable_cudagraph": stand_in / "breakable_cudagraph.py",
        "vllm.third_party.pynvml": HERE.parent / "fake_nvml.py",
        "vllm.v1.worker.gpu_worker": stand_in / "gpu_worker.py",
        "torch": stand_in / "torch_on_paper.py",
    }
    python = make_environment(folder, modules, distribution="vllm", version=version)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    registries = recorded_registries()
    write_registry(registries.get(version, registries["0.33.0"]), packages / "vllm")
    return python
