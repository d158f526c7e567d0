"""Results of benches on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.kept import read_kept, write_kept


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.json.xz"])
def test_a_result_is_replaced_whole_or_not_at_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    write_kept(file, "first")

    def stopped(path: Path, content: bytes) -> int:
        with path.open("wb") as stream:
            stream.write(content[:2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", stopped)
        with pytest.raises(KeyboardInterrupt):
            write_kept(file, "second")
    assert read_kept(file) == b"first"
    write_kept(file, "third")
    assert read_kept(file) == b"third"
    assert [one.name for one in tmp_path.iterdir()] == [name]
