import pytest

from pcpbench.session.ladder import build_ladder


def kinds(ladder):
    return [(pair.kind, pair.arm, pair.twin) for pair in ladder.pairs]


def test_the_documented_default_climbs_every_rung():
    ladder = build_ladder("eager", "full")
    assert [arm.label for arm in ladder.arms] == [
        "reference", "eager", "eager_padded[full]", "full",
    ]  # fmt: skip
    assert kinds(ladder) == [
        ("partition", "eager", "reference"),
        ("padding", "eager_padded[full]", "eager"),
        ("capture", "full", "eager_padded[full]"),
    ]
    assert [arm.replays for arm in ladder.arms] == [False, False, False, True]


def test_two_graph_arms_bring_a_padded_twin_each():
    ladder = build_ladder("piecewise", "full_and_piecewise")
    assert ("capture", "piecewise", "eager_padded[piecewise]") in kinds(ladder)
    assert (
        "capture", "full_and_piecewise", "eager_padded[full_and_piecewise]",
    ) in kinds(ladder)  # fmt: skip


@pytest.mark.parametrize("other", ["eager", "reference"])
def test_eager_padded_alone_is_padded_like_full(other):
    ladder = build_ladder(other, "eager_padded")
    assert ladder.candidate == "eager_padded[full]"
    assert not any(arm.replays for arm in ladder.arms)
    assert [kind for kind, _, _ in kinds(ladder)] == ["partition", "padding"]


def test_eager_padded_beside_a_graph_arm_is_its_twin():
    ladder = build_ladder("eager_padded", "piecewise")
    assert ladder.base == "eager_padded[piecewise]"
    assert len(ladder.arms) == 4
