"""Amaxes are reduced over the ranks of `fp8_group`, or of the group of a quantizer."""


def test_ranks_agree_on_scales(outcomes) -> None:
    found = [outcome["scales_of_a_group"] for outcome in outcomes]
    reduced, own = zip(*found, strict=True)
    assert reduced == ((448.0 / 2, 57344.0 / 2),) * 2
    assert own == ((448.0, 57344.0 / 2), (448.0 / 2, 57344.0))


def test_ranks_cast_parts_of_one_tensor(outcomes) -> None:
    for outcome in outcomes:
        found = outcome["quantizers_of_a_group"]
        assert len(found) == 5 and all(found.values()), found


def test_ranks_choose_quantizers_that_cast_parts_of_one_tensor(outcomes) -> None:
    assert all(outcome["chosen_quantizers"] for outcome in outcomes)
