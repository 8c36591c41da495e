"""Statistics that the ranks of a group reduce at the end of a step."""

from statistics_ranks import parts_of
from statistics_reference import assert_statistics, reference


def _both(outcomes, scenario: str):
    return [outcome[scenario] for outcome in outcomes]


def test_unequal_micro_batches_count_as_one_tensor(outcomes) -> None:
    expected = reference(*parts_of(0), *parts_of(1))
    for found in _both(outcomes, "unequal_micro_batches"):
        assert_statistics(found[0, "layer", "activation"], expected)


def test_a_rank_without_tensors_adds_nothing(outcomes) -> None:
    for found in _both(outcomes, "a_rank_without_tensors"):
        assert_statistics(found[0, "layer", "activation"], reference(*parts_of(0)))


def test_the_order_of_first_use_does_not_matter(outcomes) -> None:
    for found in _both(outcomes, "layers_in_another_order"):
        assert found == {"a": ord("a") + 10.0, "b": ord("b") + 10.0}


def test_weights_are_reduced_over_their_tensor_parallel_group_alone(outcomes) -> None:
    first = [parts_of(rank)[0] for rank in range(2)]
    for rank, found in enumerate(_both(outcomes, "weights")):
        assert_statistics(found["together"], reference(*first))
        for alone in ("switched off", "no group", "one rank"):
            assert_statistics(found[alone], reference(first[rank]))


def test_copies_count_once_if_a_rank_runs_the_layer_later(outcomes) -> None:
    for found in _both(outcomes, "copies_of_a_layer_that_runs_later"):
        assert found == [4.0, 4.0, 4.0]


def test_a_rank_may_have_run_nothing_yet(outcomes) -> None:
    first, second = _both(outcomes, "a_rank_that_has_run_nothing")
    assert first == {1: 1.0, 2: 2.0, 3: 13.0}
    assert second == {2: 2.0, 3: 13.0}


def test_a_collective_only_where_something_may_be_due(outcomes) -> None:
    for values, collectives in _both(outcomes, "steps_between"):
        assert values == {0: 8.0, 2: 12.0, 4: 8.0}
        assert collectives == 3


def test_layers_that_come_later_find_room(outcomes) -> None:
    for found in _both(outcomes, "layers_that_come_later"):
        assert found == {f"layer.{i}": i + 1.0 for i in range(100)}


def test_different_layers_are_an_error_on_both_ranks(outcomes) -> None:
    for message in _both(outcomes, "different_layers"):
        assert "got layer a, tensor activation only on rank 0; configuration " in message
        assert "set_tensor_reduction_group" in message


def test_ranks_that_part_company_later_stop(outcomes) -> None:
    for message in _both(outcomes, "different_layers_later"):
        assert message[0] in "12"
        assert "got layer b, tensor activation only on rank 0" in message


def test_an_error_of_a_logger_stays_on_its_rank(outcomes) -> None:
    for rank, (errors, values) in enumerate(_both(outcomes, "a_logger_that_fails")):
        assert errors == ["disk is full"] * (rank == 0)
        assert values == [1.0, 2.0, 3.0]


def test_sessions_log_what_their_ranks_saw_together(outcomes) -> None:
    expected = reference(*(parts_of(rank)[0] for rank in range(2)))
    for found in _both(outcomes, "a_session"):
        assert list(found) == [(0, "a", "activation")]
        assert_statistics(found[0, "a", "activation"], expected)


def test_sessions_with_different_layers_end_in_an_error_on_both_ranks(outcomes) -> None:
    for message in _both(outcomes, "a_session_with_different_layers"):
        assert "layer a, tensor activation only on rank 0" in message
        assert "layer b, tensor activation only on rank 1" in message


def test_scalars_of_ranks_are_logged_together(outcomes) -> None:
    assert _both(outcomes, "a_scalar") == [{"min": 1.0, "max": 2.0}] * 2
