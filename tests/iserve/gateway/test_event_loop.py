"""The gateway's event loop: uvloop's, and asyncio's where that cannot be loaded."""

from __future__ import annotations

import re

import pytest

from tests.golden_words import Golden
from tests.iserve.gateway.conftest import REPO


@pytest.mark.parametrize("is_there", [True, False])
def test_it_says_which_it_runs_on_and_serves_on_either(
    tmp_path, own_gateway, make_worker, make_route, is_there, golden: Golden
) -> None:
    own_gateway.stop()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "uvloop.py").write_text("raise ImportError('made for another machine')")
    path = str(REPO) if is_there else f"{tmp_path / 'broken'}:{REPO}"
    log_before = len(own_gateway.logged())
    own_gateway.start(wrapper=("env", f"PYTHONPATH={path}"))
    own_gateway.publish(make_route(make_worker().target()))
    assert own_gateway.complete(stream=True).body.endswith(b"data: [DONE]\n\n")
    assert own_gateway.complete().status == 200
    assert own_gateway.stop() == 0
    said = own_gateway.logged()[log_before:]
    assert ("event loop: uvloop " in said) is is_there
    assert ("event loop: asyncio " in said) is not is_there
    golden("rest-errors", re.findall(r"event loop: .*", said))
