"""Agreement of ranks on a load: threads in place of GPUs, whatever each of them finds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.variant_kernels import variant_module

ranks_module, refusals = variant_module("ranks"), variant_module("refusals")
Readiness, load_on_all = ranks_module.Readiness, ranks_module.load_on_all
REFUSED, BROKEN = "tensor x of this delta cannot be served", "out of memory"


class _Threads:
    """Ranks whose answers are exchanged by threads."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self.answers: list[Any] = [None] * count

    def rank(self, number: int) -> Any:
        """Return the ranks as ``number`` sees them."""
        made = ranks_module.Ranks((), is_last=number == len(self.answers) - 1)
        made.gathered = lambda answer: self._exchange(number, answer)
        return made

    def _exchange(self, number: int, answer: Any) -> list[Any]:
        self.answers[number] = answer
        self._barrier.wait(60)
        found = list(self.answers)
        self._barrier.wait(60)
        return found


def _run(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return what each call returns or raises, all of them at once."""
    found: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            found[at] = calls[at]()
        except Exception as error:  # noqa: BLE001 - compared
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def _outcome(found: Any) -> Any:
    if isinstance(found, Exception):
        raise found
    return found


@given(of_each=st.lists(st.tuples(st.sampled_from([*Readiness, REFUSED]), st.booleans()), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_all_ranks_load_or_none_does(of_each: list[tuple[Any, bool]]) -> None:
    threads, loaded = _Threads(len(of_each)), [False] * len(of_each)

    def load(at: int, is_broken: bool) -> bool:
        if is_broken:
            raise RuntimeError(BROKEN)
        loaded[at] = True
        return True

    def undo(at: int) -> None:
        loaded[at] = False

    def call(at: int, state: Any, is_broken: bool) -> bool:
        error = ValueError(REFUSED) if state == REFUSED else state
        return bool(
            load_on_all(
                threads.rank(at), "v", lambda: _outcome(error), lambda: load(at, is_broken), lambda: undo(at)
            )
        )

    found = _run([lambda at=at, one=one: call(at, *one) for at, one in enumerate(of_each)])  # type: ignore[misc]
    states = {state for state, _ in of_each}
    may_load = states in ({Readiness.READY}, {Readiness.IMMEDIATE})
    is_loaded = may_load and not any(is_broken for _, is_broken in of_each)
    assert loaded == [is_loaded] * len(of_each)
    assert found[:-1] == [is_loaded] * (len(of_each) - 1)  # no rank but the last raises
    if is_loaded:
        assert found[-1] is True
        return
    said = str(found[-1])
    if REFUSED in states:
        assert said == REFUSED
    elif states <= {Readiness.READING, Readiness.READY} and not may_load:
        assert "still being read" in said
        assert refusals.hides(found[-1])  # from vLLM's log
    else:
        assert said == BROKEN if may_load else "disagree on v" in said


def test_one_rank_raises_its_own_error() -> None:
    error, undone = KeyError("own"), list[None]()

    def load() -> bool:
        raise error

    ranks = ranks_module.Ranks((), is_last=True)
    with pytest.raises(KeyError) as raised:
        load_on_all(ranks, "v", lambda: Readiness.READY, load, lambda: undone.append(None))
    assert raised.value is error
    assert len(undone) == 1
