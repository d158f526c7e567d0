"""The notebooks' cells run, and print what is committed with them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_print_what_is_committed(path: Path) -> None:
    namespace: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), namespace)
            committed = "".join("".join(output["text"]) for output in cell["outputs"])
            assert printed.getvalue() == committed
