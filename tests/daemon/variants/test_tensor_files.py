"""Files of tensors: what is read is what was written, packed where that saves, and no damage is believed."""

from __future__ import annotations

import random
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.variants.tensor_files import FRAME_BYTES, DamagedFileError, pack, read_tensor, unpack, write_tensor

HEAD = bytes.fromhex("502a4d1804000000")
SIZES = [0, 1, 4095, 4096, 4097, 9000, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES]
_MANY = 2**23  # bytes; more than a reader of one frame may hold


def noise(size: int, symbols: int = 256, seed: int = 0) -> bytes:
    raw = random.Random(seed).randbytes(size)
    return raw if symbols == 256 else raw.translate(bytes(each % symbols for each in range(256)))


class Written:
    """A file that ``write_tensor`` writes."""

    def __init__(self, path: Path, data: bytes, pieces: Callable[[], Iterator[bytes]] | None = None) -> None:
        self.path, self.data, self.num_writes = path, data, 0
        write_tensor(self._write, pieces or (lambda: iter([data])), len(data))

    def _write(self, pieces: Iterable[bytes]) -> None:
        self.num_writes += 1
        with self.path.open("wb") as stream:
            stream.writelines(pieces)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def is_packed(self) -> bool:
        return self.path.read_bytes() != self.data

    def read(self) -> bytes:
        return b"".join(read_tensor(self.path, len(self.data)))


def packed(data: bytes) -> bytes:
    return b"".join(pack([data]))


def with_length(frame: bytes) -> bytes:
    return HEAD + len(frame).to_bytes(4, "little") + frame


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tensor"


@settings(max_examples=40)
@given(
    size=st.sampled_from(SIZES) | st.integers(0, 3 * FRAME_BYTES),
    symbols=st.sampled_from([1, 3, 16, 200, 256]),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    seed=st.integers(0, 9),
)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, size: int, symbols: int, cuts: list[float], seed: int
) -> None:
    """However the bytes are divided when they are written; as another reader of zstandard reads them, too."""
    data = noise(size, symbols, seed)
    ends = [0, *sorted(int(cut * size) for cut in cuts), size]
    found = Written(
        tmp_path_factory.mktemp("files") / "tensor", data, lambda: iter([data[a:b] for a, b in pairwise(ends)])
    )
    assert found.read() == data
    assert found.is_packed == (found.size < size)
    assert found.size <= size
    if found.is_packed:
        assert all(len(piece) <= FRAME_BYTES for piece in read_tensor(found.path, size))
        with found.path.open("rb") as stream:
            assert zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True).read() == data


@pytest.mark.skipif(shutil.which("zstd") is None, reason="there is no zstd command")
def test_the_zstd_command_unpacks_a_file(path: Path) -> None:
    found = Written(path, noise(2 * FRAME_BYTES + 5, 16))
    assert found.is_packed
    with path.open("rb") as stream:
        assert subprocess.run(["zstd", "-d"], stdin=stream, capture_output=True, check=True).stdout == found.data


@given(data=st.binary(max_size=9000))
def test_frames_have_what_was_packed(data: bytes) -> None:
    """Also where they are longer than it, which ``write_tensor`` never keeps."""
    assert b"".join(unpack(BytesIO(packed(data)), len(data))) == data


def test_a_packed_tensor_is_held_frame_by_frame(path: Path) -> None:
    data = noise(24 * FRAME_BYTES, 16)

    def pieces() -> Iterator[bytes]:
        yield from (data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES))

    tracemalloc.start()
    try:
        found = Written(path, data, pieces)
        assert sum(map(len, read_tensor(path, len(data)))) == len(data)
        assert tracemalloc.get_traced_memory()[1] < _MANY
    finally:
        tracemalloc.stop()
    assert found.size < 0.52 * len(data)


def test_a_frame_that_nothing_is_saved_of_is_read_in_a_tensor_that_packs(path: Path) -> None:
    found = Written(path, bytes(FRAME_BYTES) + noise(FRAME_BYTES) + bytes(5))
    assert found.is_packed
    assert found.size > FRAME_BYTES
    assert found.read() == found.data


def test_frames_are_those_of_zstandard_at_the_level(path: Path) -> None:
    data = noise(9000, 16) + bytes(9000) + noise(9000, 16)
    for level in (1, 19):
        frame = zstandard.ZstdCompressor(level=level).compress(data)
        assert b"".join(pack([data], level)) == with_length(frame)
    assert len(frame) < len(packed(data))


class TestWhatIsPacked:
    """The rule of decision 55: the first MiB and the whole are 5% and 4 KiB smaller."""

    @staticmethod
    def written(path: Path, size: int, saved: float, begin: bool = True) -> Written:
        """Write noise of which a run of ``saved`` bytes is zeros."""
        run = int(saved)
        zeros, rest = bytes(run), noise(size - run)
        return Written(path, zeros + rest if begin else rest + zeros)

    @pytest.mark.parametrize("size", [FRAME_BYTES, 3 * FRAME_BYTES])
    @pytest.mark.parametrize(("share", "is_packed"), [(0.0, False), (0.048, False), (0.052, True), (1.0, True)])
    def test_a_twentieth_is_saved(self, path: Path, size: int, share: float, is_packed: bool) -> None:
        assert self.written(path, size, share * size).is_packed == is_packed

    @pytest.mark.parametrize(
        ("size", "saved", "is_packed"),
        [(4096, 4096, False), (4200, 4200, True), (20_000, 4000, False), (20_000, 4300, True)],
    )
    def test_a_block_of_the_disk_is_saved(self, path: Path, size: int, saved: int, is_packed: bool) -> None:
        found = self.written(path, size, saved)
        assert (found.is_packed, found.num_writes) == (is_packed, 1)

    def test_a_tensor_whose_end_alone_packs_is_plain(self, path: Path) -> None:
        found = self.written(path, 3 * FRAME_BYTES, 2 * FRAME_BYTES, begin=False)
        assert (found.is_packed, found.num_writes) == (False, 1)

    def test_a_tensor_whose_beginning_alone_packs_is_written_again(self, path: Path) -> None:
        found = self.written(path, 3 * FRAME_BYTES, 0.06 * FRAME_BYTES)
        assert (found.is_packed, found.num_writes) == (False, 2)
        assert found.read() == found.data

    def test_no_more_is_written_than_a_packed_tensor_may_have(self, path: Path) -> None:
        """And not only behind the last frame, when the disk has had all of it."""
        data, sizes = bytes(FRAME_BYTES // 5) + noise(4 * FRAME_BYTES), list[int]()

        def write(pieces: Iterable[bytes]) -> None:
            sizes.append(0)
            for piece in pieces:
                sizes[-1] += len(piece)

        write_tensor(write, lambda: iter([data]), len(data))
        assert sizes[1:] == [len(data)]
        assert sizes[0] <= 0.95 * len(data)

    def test_a_tensor_that_cannot_be_packed_is_not_read_for_it(self, path: Path) -> None:
        calls: list[int] = []

        def pieces() -> Iterator[bytes]:
            calls.append(1)
            return iter([bytes(4096)])

        Written(path, bytes(4096), pieces)
        assert len(calls) == 1


SMALL = bytes(FRAME_BYTES) + noise(60) + bytes(5000)  # two frames, packed 200 bytes


def check_damaged(path: Path, content: bytes, num_bytes: int) -> str:
    """Return what is wrong with a file; it is found in the memory of a frame."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFileError) as caught:
            for _ in read_tensor(path, num_bytes):
                pass
        assert tracemalloc.get_traced_memory()[1] < _MANY
    finally:
        tracemalloc.stop()
    return str(caught.value)


class TestDamage:
    def test_every_shorter_file(self, path: Path) -> None:
        whole = packed(SMALL)
        assert len(whole) < 300
        for length in range(len(whole)):
            check_damaged(path, whole[:length], len(SMALL))

    @pytest.mark.parametrize("flipped", [1, 0x80])
    def test_a_changed_byte_anywhere_gives_no_more_and_no_fewer_bytes(self, path: Path, flipped: int) -> None:
        """The hash says whether they are the right ones."""
        whole = packed(SMALL)
        num_damaged = 0
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flipped]) + whole[place + 1 :])
            try:
                assert sum(map(len, read_tensor(path, len(SMALL)))) == len(SMALL)
            except DamagedFileError:
                num_damaged += 1
        assert num_damaged > 40

    @pytest.mark.parametrize(
        "more", [b"\0", packed(b"x"), with_length(b""), HEAD, (0x184D2A51).to_bytes(4, "little") + bytes(4)]
    )
    def test_anything_behind_the_last_frame(self, path: Path, more: bytes) -> None:
        check_damaged(path, packed(SMALL) + more, len(SMALL))

    def test_a_file_that_is_longer_than_its_tensor(self, path: Path) -> None:
        check_damaged(path, bytes(101), 100)

    def test_a_plain_file_that_is_shorter(self, path: Path) -> None:
        check_damaged(path, noise(99), 100)

    def test_a_plain_file_that_grows_while_it_is_read_gives_no_more_than_the_tensor(self, path: Path) -> None:
        path.write_bytes(noise(5 * 2**20))
        pieces = read_tensor(path, 5 * 2**20)
        first = next(pieces)
        with path.open("ab") as stream:
            stream.write(b"more")
        assert first + b"".join(pieces) == noise(5 * 2**20)

    def test_a_frame_that_says_it_has_a_tebibyte(self, path: Path) -> None:
        """Magic, a header of one segment whose size has eight bytes, 2**40, and an empty last block."""
        frame = bytes.fromhex("28b52ffd e0") + (2**40).to_bytes(8, "little") + bytes.fromhex("010000")
        assert zstandard.get_frame_parameters(frame).content_size == 2**40
        check_damaged(path, with_length(frame), 2**20)
        check_damaged(path, with_length(frame), 2**40)

    def test_a_frame_that_has_more_than_it_may(self, path: Path) -> None:
        bomb = zstandard.ZstdCompressor().compress(bytes(2**26))
        for num_bytes in (2**20, 2**26):
            check_damaged(path, with_length(bomb), num_bytes)

    def test_a_frame_that_has_less(self, path: Path) -> None:
        check_damaged(path, packed(bytes(5000)), 5001)

    def test_a_length_of_four_gibibytes(self, path: Path) -> None:
        check_damaged(path, HEAD + b"\xff" * 4 + bytes(50), 2**20)

    def test_a_length_that_is_not_that_of_the_frame(self, path: Path) -> None:
        """The frame itself is sound."""
        whole = packed(bytes(5000))
        for length in (len(whole) - 12 - 1, len(whole) - 12 + 1):
            check_damaged(path, HEAD + length.to_bytes(4, "little") + whole[12:], 5000)

    @pytest.mark.parametrize("place", range(8))
    def test_another_head_of_a_frame(self, path: Path, place: int) -> None:
        whole = packed(bytes(5000))
        check_damaged(path, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], 5000)

    def test_a_window_larger_than_a_frame(self, path: Path) -> None:
        """64 MiB, which zstandard would allocate for a frame that is cut off."""
        frame = bytes.fromhex("28b52ffd 80 80") + (5000).to_bytes(4, "little") + bytes.fromhex("0c0000 00")
        assert zstandard.get_frame_parameters(frame).window_size == 2**26
        assert "memory" in check_damaged(path, with_length(frame), 5000)

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param(zstandard.ZstdCompressor().compress(SMALL[-5000:]), id="without a length"),
            pytest.param(
                with_length(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(5000))), id="no size"
            ),
            pytest.param(with_length(HEAD[:4] + (5000).to_bytes(4, "little") + bytes(5000)), id="skippable"),
            pytest.param(
                with_length(zstandard.ZstdCompressor().compress(bytes(5000)) + packed(b"x")),
                id="two in one length",
            ),
            pytest.param(with_length(b"\x1f\x8b\x08" + bytes(50)), id="another format"),
            pytest.param(
                with_length(
                    zstandard.ZstdCompressor(
                        dict_data=zstandard.ZstdCompressionDict(
                            noise(3000), dict_type=zstandard.DICT_TYPE_RAWCONTENT
                        )
                    ).compress(noise(3000)[:2000] + noise(3000))
                ),
                id="of a dictionary",
            ),
        ],
    )
    def test_a_frame_that_the_store_does_not_write(self, path: Path, content: bytes) -> None:
        check_damaged(path, content.ljust(4, b"\0"), 5000 if len(content) < 5000 else 5100)
