"""Amaxes are reduced over the ranks of `fp8_group`."""


def test_ranks_agree_on_scales(outcomes) -> None:
    found = [outcome["scales_of_a_group"] for outcome in outcomes]
    reduced, own = zip(*found, strict=True)
    assert reduced == ((448.0 / 2, 57344.0 / 2),) * 2
    assert own == ((448.0, 57344.0 / 2), (448.0 / 2, 57344.0))
