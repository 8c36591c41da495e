"""The schema of each operator, and its results for fake tensors, match those of real calls."""

from collections.abc import Callable
from typing import Any

import fp8_reference as fp8
import pytest
import torch
from torch.utils._pytree import tree_map_only

from transformer_engine.pytorch.fp8.inspector import show_to_inspector  # noqa: F401
from transformer_engine.pytorch.kernels.delayed_scaling import entry
from transformer_engine.pytorch.kernels.moments import EMPTY_CAST_MOMENTS, EMPTY_MOMENTS
from transformer_engine.pytorch.scale_layout import block_layout

F32, BF16 = torch.float32, torch.bfloat16
ROWS, COLS = 32, 48
Arguments = tuple[Any, ...]
# Their schemas do not say what they write, because nothing reads it before the step ends.
WRITE_UNANNOUNCED = {"moments", "cast_moments", "count_amaxes"}
# Tested in attention/test_cudnn_adapter.py and attention/test_cudnn_fp8_adapter.py.
ON_GPUS_ALONE = {
    "attention_forward",
    "attention_backward",
    "fp8_attention_forward",
    "fp8_attention_backward",
}
# Tested in compiled/test_chain_operators.py.
OF_CHAINS = {"chain", "chain_forward", "chain_backward"}


def plain(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape or (ROWS, COLS)).to(dtype)


def labels() -> torch.Tensor:
    return torch.randint(-2, COLS, (ROWS,), dtype=torch.int32)


def codes(*shape: int) -> torch.Tensor:
    return fp8.encode(plain(*shape), fp8.E4M3, 1.0)


def row(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows(*shape: int) -> torch.Tensor:
    return row(EMPTY_MOMENTS).expand(*shape, -1).contiguous()


def table(device: str) -> torch.Tensor:
    """A table with one state, whose history and scales live as long as the table."""
    history, scale = torch.ones(3, 4, device=device).t(), torch.ones(3, device=device)
    found = torch.tensor([entry(scale, history)], device=device)
    found.references = history, scale
    return found


ONE, PAIR, SEED = torch.ones(1), torch.ones(2), torch.tensor([12345])
FP8_OUTPUT = (fp8.E4M3, ONE, None, True, True)
FP8_PAIR, PLAIN_PAIR = (PAIR, PAIR, fp8.E4M3, fp8.E4M3), (None, None, -1, -1)
SCALING, UNSEEN, NUMBERS = (False, False, 0.0), (None, None), (0.5, 1.0, 0.0)
PRODUCT, INTO = (False, False, False, None, True, None), (False, False, True, False, None, True)
BLOCKS = block_layout(1).code(fp8.E4M3)
CASES: dict[str, Callable[[], Arguments]] = {
    "activation_backward": lambda: (
        *(plain(), plain(ROWS, 2 * COLS), 11, True, *FP8_OUTPUT, *SCALING, F32, *UNSEEN, *NUMBERS),
        *(plain(), None, fp8.E4M3, False),
    ),
    "activation_forward": lambda: (*(plain(), 11, True, *FP8_OUTPUT, *SCALING, *UNSEEN, *NUMBERS),),
    "amax": lambda: (plain(),),
    "cast_moments": lambda: (plain(), codes(), PAIR, fp8.E4M3, row(EMPTY_CAST_MOMENTS), None, True),
    "count_amaxes": lambda: (plain(), plain(2, 1), [torch.ones(1)]),
    "cross_entropy_backward_": lambda: (plain(), labels(), plain(ROWS), None, 0.1, 0.01),
    "cross_entropy_backward_codes_": lambda: (
        *(plain(), labels(), plain(ROWS), None, 0.1, 0.01, PAIR, fp8.E5M2),
        *(codes(2 * ROWS, COLS), codes(COLS, 2 * ROWS), ROWS, False),
    ),
    "cross_entropy_forward": lambda: (plain(), labels()),
    "current_scales": lambda: (plain(), fp8.E5M2, True, 0.0),
    "current_scales_many": lambda: ([plain(), plain(COLS)], fp8.E4M3, False, 0.0),
    "delayed_scaling_update": lambda: ("table", None, "max", 448.0, 0, torch.ones(3), None),
    "dequantize": lambda: (codes(), fp8.E4M3, PAIR, BF16),
    "dropout_add_backward": lambda: (plain(), SEED, 0.5, BF16, F32),
    "dropout_add_forward": lambda: (plain(), plain(COLS), plain(), SEED, 0.5),
    "gather_amax": lambda: ("table", 3, None, "max"),
    "gemm": lambda: (codes(), codes(16, COLS), BF16, *FP8_PAIR, *PRODUCT),
    "gemm_into": lambda: (plain(ROWS, 16), plain(), plain(16, COLS), *PLAIN_PAIR, *INTO),
    "merge_parts": lambda: (
        *(plain(2, 6, 4, 8), plain(2, 6, 4), [plain(2, 6, 4, 8, dtype=BF16)]),
        *([plain(2, 6, 4)], [0], 1, False),
    ),
    "merge_rows": lambda: (rows(3, 1), torch.zeros(1, dtype=torch.int64), rows(1), None),
    "moments": lambda: (plain(), row(EMPTY_MOMENTS), None),
    "norm_backward": lambda: (
        plain(),
        plain(),
        plain(COLS),
        plain(ROWS),
        plain(ROWS),
        0,
        False,
        None,
    ),
    "norm_forward": lambda: (
        plain(),
        plain(COLS),
        plain(COLS),
        0,
        1e-5,
        False,
        BF16,
        *FP8_OUTPUT,
        *SCALING,
        *UNSEEN,
    ),
    "quantize": lambda: (plain(), fp8.E4M3, ONE, None, None, True, True, F32, *UNSEEN),
    "quantize_blocks": lambda: (plain(), BLOCKS, True, 0.0, True, True, F32, *UNSEEN),
    "quantize_many": lambda: (
        *([plain()], [codes()], [codes(COLS, ROWS)], [plain(2)], [ONE], [], fp8.E4M3),
    ),
    "rope": lambda: (plain(6, 2, 4, 8), plain(6, 8), None, None, False, False, False, 4, 3),
    "scales_of_call": lambda: ([ONE, ONE], False, True, 2),
    "show_to_inspector": lambda: (plain(), codes(), PAIR, fp8.E4M3, None, None, -1, "a tensor"),
    "softmax_backward": lambda: (plain(2, 4, 8, 8), plain(2, 4, 8, 8), 0.5),
    "softmax_forward": lambda: (plain(2, 4, 8, 8), torch.zeros(2, 1, 8, 8).bool(), 0.5, -1, -1, 0),
    "split_qkv": lambda: (plain(5, 2, 96), 4, 4, 8, True),
    "spread": lambda: (plain(COLS), plain(ROWS, COLS), 4),
    "sum_squares": lambda: ([plain(), plain(3).bfloat16()],),
    "transpose": lambda: (codes(),),
    "transpose_blocks": lambda: (codes(), torch.ones(1, 4)),
}


def test_every_operator_is_here() -> None:
    schemas = torch._C._jit_get_all_schemas()
    known = {schema.name.removeprefix("te::") for schema in schemas if schema.name[:4] == "te::"}
    assert known == CASES.keys() | ON_GPUS_ALONE | OF_CHAINS


@pytest.mark.parametrize("name", CASES)
def test_schema_and_shapes(name: str, device: str) -> None:
    arguments = [table(device) if a == "table" else a for a in CASES[name]()]
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)
    checks = (
        ["test_faketensor"] if name in WRITE_UNANNOUNCED else ["test_schema", "test_faketensor"]
    )
    torch.library.opcheck(getattr(torch.ops.te, name), tuple(moved), test_utils=checks)
