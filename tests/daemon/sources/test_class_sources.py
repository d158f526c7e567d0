"""Bases of classes that are not imported, held against Python's own answer for the same package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from daemon.sources.class_sources import ClassSources

PACKAGE = {
    "__init__.py": "",
    "interfaces.py": "class SupportsLoRA: ...\nclass SupportsPP: ...\nclass Flagged:\n    flag = True\n",
    "base.py": "from . import interfaces\nfrom .interfaces import SupportsPP\n"
    "class Base(SupportsPP): ...\nclass Other(interfaces.SupportsLoRA): ...\nRenamed = Other\n",
    "deep/__init__.py": "from .inner import Inner as Outer\n",
    "deep/inner.py": "from ..base import Base\nfrom ..interfaces import Flagged\n"
    "class Inner(Base, Flagged):\n    off = False\n    table = {'a': 1}\n    empty = {}\n",
    "chosen.py": "try:\n    import not_there\n    from .base import Base as Chosen\n"
    "except ImportError:\n    from .base import Renamed as Chosen\nclass Uses(Chosen): ...\n",
    "outside.py": "import abc\nfrom collections import OrderedDict\nclass Here(OrderedDict, abc.ABC): ...\n",
    "untold.py": "def make(): return object\nMade = make()\nclass Model(Made): ...\nclass Called(make()): ...\n",
    "circle.py": "from .circle2 import B\nclass A(B): ...\n",
    "circle2.py": "from .circle import A\nclass B(A): ...\n",
    "broken.py": "class (:\n",
    "user.py": "from .broken import X\nclass Y(X): ...\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("classes") / "a_made_package"
    for name, text in PACKAGE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("module", "name"),
    [("base", "Base"), ("base", "Other"), ("deep", "Outer"), ("outside", "Here"), ("interfaces", "Flagged")],
)
def test_the_bases_are_those_that_python_finds(folder, monkeypatch, module, name):
    monkeypatch.syspath_prepend(str(folder.parent))
    real = getattr(importlib.import_module(f"{folder.name}.{module}"), name)
    found = ClassSources(folder, folder.name).lineage(f"{folder.name}.{module}", name)
    assert found.is_whole
    ours = {one.__name__ for one in real.__mro__ if one.__module__.startswith(folder.name)}
    assert ours <= found.names
    assert found.names - ours <= {one.__name__ for one in real.__mro__}
    for loaded in [one for one in sys.modules if one.startswith(folder.name)]:
        del sys.modules[loaded]


def test_a_name_that_is_bound_two_ways_has_the_bases_of_both(folder):
    found = ClassSources(folder, folder.name).lineage(f"{folder.name}.chosen", "Uses")
    assert found.is_whole
    assert {"SupportsPP", "SupportsLoRA"} <= found.names


def test_attributes_are_those_that_are_true_in_some_base(folder):
    found = ClassSources(folder, folder.name).lineage(f"{folder.name}.deep.inner", "Inner")
    assert found.assigned == {"flag", "table"}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param("untold", "Model", id="a-base-that-is-made"),
        pytest.param("untold", "Called", id="a-base-that-is-called"),
        pytest.param("user", "Y", id="a-base-in-a-file-that-is-no-python"),
        pytest.param("base", "Absent", id="no-such-class"),
        pytest.param("absent", "Any", id="no-such-module"),
    ],
)
def test_what_the_sources_do_not_tell_is_not_told(folder, module, name):
    assert not ClassSources(folder, folder.name).lineage(f"{folder.name}.{module}", name).is_whole


def test_classes_that_derive_from_each_other_end(folder):
    assert ClassSources(folder, folder.name).lineage(f"{folder.name}.circle", "A").names == {"A", "B"}
