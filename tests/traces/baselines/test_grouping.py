"""Search space of AlpaServe."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.traces.baselines.small_models import DEGREES, cluster
from traces.baselines.grouping import bucketings, group_sizes, in_order, partitions, shape


def test_models_are_cut_apart_where_they_differ_most() -> None:
    """Ratios of neighbours: 1.1, 4.5, 2, 1."""
    sizes = {"b": 1.1, "a": 1.0, "c": 5.0, "e": 10.0, "d": 10.0}
    assert list(bucketings(sizes, 8)) == [
        (("a", "b", "c", "d", "e"),),
        (("a", "b"), ("c", "d", "e")),
        (("a", "b"), ("c",), ("d", "e")),
        (("a",), ("b",), ("c",), ("d", "e")),
    ]
    assert len(list(bucketings(sizes, 2))) == 2
    assert list(bucketings({"a": 1.0, "b": 1.0}, 8)) == [(("a", "b"),)]


@given(
    st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.floats(0.1, 100), min_size=1),
    st.integers(1, 8),
)
def test_every_model_is_in_one_bucket(sizes: dict[str, float], most: int) -> None:
    for buckets in bucketings(sizes, most):
        assert sorted(name for bucket in buckets for name in bucket) == sorted(sizes)
        assert 1 <= len(buckets) <= most
        largest = [max(sizes[name] for name in bucket) for bucket in buckets]
        assert largest == sorted(largest)


def test_group_sizes() -> None:
    assert group_sizes(8) == [1, 2, 4, 8]
    assert group_sizes(6) == [1, 2, 3, 4, 6]
    assert group_sizes(1) == [1]


@given(st.integers(1, 12), st.integers(1, 8))
def test_groups_share_no_gpu_and_leave_none_out(num_gpus: int, per_node: int) -> None:
    gpus = in_order(cluster(num_gpus, per_node=per_node))
    found = list(partitions(gpus, DEGREES))
    assert len({tuple((g.tp, g.pp, len(g.gpus)) for g in groups) for groups in found}) == len(found)
    for groups in found:
        assert [gpu for group in groups for gpu in group.gpus] == list(gpus)
        assert all(group.tp * group.pp == len(group.gpus) for group in groups)
        degrees = [(g.tp, g.pp) for g in groups]
        assert degrees[: num_gpus // len(groups[0].gpus)] == [degrees[0]] * (num_gpus // len(groups[0].gpus))
        assert all(g.tp <= groups[0].tp for g in groups)


def test_eight_gpus_in_groups_of_one_to_eight() -> None:
    pairs = [(tp, pp) for tp in (1, 2, 4, 8) for pp in range(1, 9) if tp * pp <= 8]
    found = [(g[0].tp, g[0].pp, len(g)) for g in partitions(in_order(cluster(8)), pairs)]
    assert found == [
        (1, 1, 8), (1, 2, 4), (2, 1, 4), (1, 4, 2), (2, 2, 2), (4, 1, 2),
        (1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1),
    ]  # fmt: skip


def test_a_shape_tells_nodes_and_room_apart() -> None:
    eight = in_order(cluster(8, per_node=4))
    assert shape(eight[:4]) == shape(eight[4:])
    assert shape(eight[2:6]) != shape(eight[:4])
    assert shape(in_order(cluster(2, size_bytes=50))) != shape(eight[:2])
