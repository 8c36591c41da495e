"""A scenario, as in `tensor_parallel_scenarios.py`: layers that ask for overlap."""

import torch
from tensor_parallel_ranks import column_and_row, raised

import transformer_engine.pytorch as te


def overlap_on_request(rank: int) -> None:
    """Overlap needs `initialize_ub` for the ranks of the layer; the report names the layer."""
    column, row = column_and_row(ub_overlap_ag=True, ub_name="fc1", name="fc")
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    message = raised(RuntimeError, lambda: column(x))
    assert "expected initialize_ub before the first forward" in message, message
    assert "(gather), got none (layer fc)" in message, message
    for error, arguments, text in (
        (ValueError, {"tp_size": 3}, "expected tp_size to divide the 2 ranks, got 3"),
        (TypeError, {"tp_size": "2"}, "expected tp_size to be an int"),
        (ValueError, {"shape": [32]}, "expected shape [tokens of all ranks, features], got [32]"),
        (ValueError, {"shape": [33, 64]}, "expected tokens that 2 ranks can share, got 33"),
        (TypeError, {"use_fp8": 1}, "expected use_fp8 to be True or False"),
        (TypeError, {"quantization_modes": ["fp8"]}, "a list of UserBufferQuantizationMode"),
        (ValueError, {"dtype": torch.int8}, "expected dtype float32, float16 or bfloat16"),
        (ValueError, {"ub_cfgs": {"fc1_fpro": {}}}, "(did you mean fc1_fprop?)"),
        (ValueError, {"ub_cfgs": {"fc1_fprop": {"num_sms": 2}}}, "(did you mean num_sm?)"),
        (ValueError, {"ub_cfgs": {"fc1_fprop": {"method": "ring"}}}, "method of fc1_fprop"),
        (ValueError, {"ub_cfgs": [{}, {}]}, "one mapping in ub_cfgs for each of 1 modes, got 2"),
        (ValueError, {"bootstrap_backend": "ucx"}, "got 'ucx'"),
    ):
        call = {"shape": [32, 64], "tp_size": 2, **arguments}
        message = raised(error, lambda: te.initialize_ub(**call))  # noqa: B023
        assert text in message, message
    configs = {"fc1_fprop": {"method": "ring_exchange", "num_splits": 2, "aggregate": 0}}
    te.initialize_ub([32, 64], 2, use_fp8=True, ub_cfgs=configs, bootstrap_backend="gloo")
    try:
        assert "destroy_ub before a second" in raised(
            RuntimeError, lambda: te.initialize_ub([32, 64], 2)
        )
        plain, _ = column_and_row()
        plain.load_state_dict(column.state_dict())
        assert torch.equal(column(x), plain(x))
        row(x[:, :32])
        report = te.parallel_report()
        assert report.asked == {"fc": row.ranks.overlap}, report.asked
        assert "fc  asks for overlap: grad gather" in str(report), str(report)
    finally:
        te.destroy_ub()
    te.initialize_ub([32, 64], 1)
    try:
        other, _ = column_and_row(ub_overlap_ag=True, ub_name="fc1", name="fc")
        message = raised(ValueError, lambda: other(x))
        assert "expected initialize_ub with tp_size=2, got 1 (layer fc)" in message, message
    finally:
        te.destroy_ub()
