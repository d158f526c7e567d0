"""Sources are parsed one at a time, for all callers."""

from __future__ import annotations

import ast
import gc
import inspect
import textwrap
import threading
import time

import pytest

from daemon.sources.python_sources import parse_python


def test_threads_that_parse_at_once_all_get_the_tree() -> None:
    """At different depths of calls, and giving way to one another while garbage is collected within a parse."""
    source = inspect.getsource(textwrap)
    whole = ast.dump(ast.parse(source))
    found: list[object] = []
    barrier = threading.Barrier(4)

    def parse(depth: int) -> None:
        if depth:
            parse(depth - 1)
            return
        barrier.wait()
        try:
            found.append(ast.dump(parse_python(source)))
        except SystemError as error:  # of CPython 3.11, without the lock
            found.append(error)

    def give_way(_phase: str, _about: object) -> None:
        time.sleep(0)

    threads = [threading.Thread(target=parse, args=(3 * number,)) for number in range(4)]
    before = gc.get_threshold()
    gc.callbacks.append(give_way)
    gc.set_threshold(100)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*before)
    assert found == [whole] * 4


def test_what_is_no_python_is_said_so() -> None:
    with pytest.raises(SyntaxError):
        parse_python("def")
