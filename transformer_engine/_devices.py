"""What a GPU can do here, in words: the doctor, errors and the table of the documentation ask this.

The native core decides (`csrc/cuda/policy/device_limits.h`); nothing here needs torch or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from transformer_engine import _C, _env


@dataclass(frozen=True)
class DeviceLimits:
    """What kernels and matrix products may use of a GPU.

    Attributes:
        capability: compute capability, 10 * major + minor.
        code: compute capability that the kernels were compiled for; lower than `capability`
            where the driver compiles portable code for this GPU.
        multiprocessors: number of streaming multiprocessors.
        shared_bytes: the most shared memory of a thread block, in bytes.
        cluster: the most thread blocks in a cluster; 1 where there are no clusters.
        dependent_launch: programmatic dependent launch is used: a kernel starts while the one
            before it drains.
        fp8_conversion: the GPU has instructions that cast to FP8.
        fp8_products: cuBLASLt multiplies FP8 codes.
        block_scales: cuBLASLt multiplies FP8 codes whose blocks of 128 have scales.
    """

    capability: int
    code: int
    multiprocessors: int
    shared_bytes: int
    cluster: int
    dependent_launch: bool
    fp8_conversion: bool
    fp8_products: bool
    block_scales: bool


class Generation(NamedTuple):
    """GPUs of one compute capability.

    Attributes:
        name: name of the generation.
        examples: some of the GPUs.
        capability: 10 * major + minor.
        multiprocessors: those of the largest of the examples.
        shared_kib: the most shared memory of a thread block, in KiB.
        tested: what has run on such a GPU.
    """

    name: str
    examples: str
    capability: int
    multiprocessors: int
    shared_kib: int
    tested: str


_FP8_TENSOR_CORES = 89
_IN_SOFTWARE = "integer arithmetic, the same codes"
_COMPILED = "compiled only"
GENERATIONS = (
    Generation("Ampere", "A100", 80, 108, 163, _COMPILED),
    Generation("Ampere", "RTX 3090, A40", 86, 84, 99, _COMPILED),
    Generation("Ada", "RTX 4090, L40S", 89, 144, 99, _COMPILED),
    Generation("Hopper", "H100, H200", 90, 132, 227, "the whole test suite"),
    Generation("Blackwell", "B200", 100, 148, 227, _COMPILED),
    Generation("Blackwell", "RTX 5090", 120, 170, 99, _COMPILED),
)


def device_limits(index: int) -> DeviceLimits:
    """Returns the limits of GPU `index`, without features that environment variables switch off.

    Raises:
        NotImplementedError: this build has no code for that GPU.
    """
    return DeviceLimits(**_C.device_limits(index))


def limits_of(capability: tuple[int, int], on: _env.DeviceVariables | None = None) -> DeviceLimits:
    """Returns the limits of a GPU that need not be in this machine, with kernels compiled for it.

    Args:
        capability: compute capability.
        on: the features that are left on; None stands for all.

    >>> limits_of((8, 0)).fp8_products, limits_of((9, 0)).fp8_products
    (False, True)
    """
    number = 10 * capability[0] + capability[1]
    # The newest generation that is not newer than this GPU; the oldest one for older GPUs.
    like = [GENERATIONS[0], *(one for one in GENERATIONS if one.capability <= number)][-1]
    facts = (number, number, like.multiprocessors, 1024 * like.shared_kib)
    return DeviceLimits(**_C.device_limits_of(*facts, *(on or _env.DeviceVariables())))


def why_no_product(limits: DeviceLimits, in_blocks: bool) -> str:
    """Why cuBLASLt does not multiply FP8 operands on this GPU; "" where it does.

    With `in_blocks` each block of 128 values has its own scale.
    """
    capability = _number(limits.capability)
    if limits.capability < _FP8_TENSOR_CORES:
        return f"FP8 tensor cores need compute capability 8.9, this GPU has {capability}"
    if not limits.fp8_products:
        return "FP8 tensor cores are switched off by TE_FP8_TENSOR_CORES=0"
    if in_blocks and not limits.block_scales:
        return f"scales of blocks of 128 need compute capability 9.0, this GPU has {capability}"
    return ""


def replacement(in_blocks: bool) -> str:
    """What is computed where cuBLASLt multiplies no FP8 operands."""
    if in_blocks:
        return "fp32 products of the dequantised operands: correct and slow"
    return "bf16 products of the FP8 codes: correct, no faster than bf16"


def described(limits: DeviceLimits) -> dict[str, str]:
    """What each part of the package does on such a GPU, by the name of the part.

    >>> described(limits_of((8, 0)))["casts to FP8"]
    'integer arithmetic, the same codes'
    """

    def products(in_blocks: bool) -> str:
        slow = why_no_product(limits, in_blocks)
        return replacement(in_blocks) if slow else "FP8 tensor cores, by cuBLASLt"

    clusters, follows = limits.cluster > 1, limits.dependent_launch
    return {
        "kernels compiled for": _number(limits.code),
        "casts to FP8": "instructions" if limits.fp8_conversion else _IN_SOFTWARE,
        "FP8 products": products(in_blocks=False),
        "with scales of blocks of 128": products(in_blocks=True),
        "norms of wide rows": f"up to {limits.cluster} blocks a row"
        if clusters
        else "a block a row",
        "a kernel starts": "while the one before drains" if follows else "after the one before",
        "shared memory of a block": f"{limits.shared_bytes // 1024} KiB",
    }


def _number(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def table() -> str:
    """Markdown: what each generation gets. The documentation shows it."""
    columns = [described(limits_of(divmod(one.capability, 10))) for one in GENERATIONS]
    head = [f"{one.name} {_number(one.capability)}" for one in GENERATIONS]
    rows = [[part, *(column[part] for column in columns)] for part in columns[0]]
    rows[0] = ["for example", *(one.examples for one in GENERATIONS)]
    rows.append(["tested by us", *(one.tested for one in GENERATIONS)])
    lines = [["", *head], ["---"] * (1 + len(head)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
