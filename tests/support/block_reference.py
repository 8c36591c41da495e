"""Reference for block scaling, written with torch operations."""

import fp8_reference as fp8
import torch

BLOCK = 128


def _tiles(matrix: torch.Tensor, dimensions: int) -> torch.Tensor:
    """`[row blocks, rows per block, column blocks, columns per block]`, padded with zeros."""
    height = 1 if dimensions == 1 else BLOCK
    rows, cols = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -cols % BLOCK, 0, -rows % height))
    return padded.view(padded.shape[0] // height, height, padded.shape[1] // BLOCK, BLOCK)


def scales(
    x: torch.Tensor, dimensions: int, format: int, power_of_2: bool, epsilon: float = 0.0
) -> torch.Tensor:
    """Returns the fp32 scale of every block of a matrix, `[row blocks, column blocks]`."""
    magnitudes = _tiles(x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf), dimensions)
    amax = magnitudes.amax(dim=(1, 3)).clamp(min=epsilon)
    scale = torch.tensor(fp8.LARGEST[format]) / amax
    scale = scale.masked_fill(amax.isinf() | (amax == 0), 1.0)
    scale = scale.masked_fill(scale.isinf(), torch.finfo(x.dtype).max)
    if power_of_2:
        scale = (scale.view(torch.int32) & -(2**23)).view(torch.float32)
    return scale


def spread(per_block: torch.Tensor, shape: tuple[int, int], dimensions: int) -> torch.Tensor:
    """Returns a matrix of `shape` in which every element has the value of its block."""
    if dimensions == 2:
        per_block = per_block.repeat_interleave(BLOCK, 0)
    return per_block.repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def stored(per_block: torch.Tensor, dimensions: int) -> torch.Tensor:
    """The layout that GEMMs read.

    The scales of 1 x 128 blocks are transposed. Then rows are padded with zeros to a multiple of
    four.
    """
    per_block = per_block.t() if dimensions == 1 else per_block
    return torch.nn.functional.pad(per_block, (0, -per_block.shape[1] % 4)).contiguous()


def quantize(
    x: torch.Tensor,
    dimensions: int,
    format: int = fp8.E4M3,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a matrix, and the inverse scales as stored."""
    scale = scales(x, dimensions, format, power_of_2, epsilon)
    codes = fp8.encode(x, format, spread(scale, tuple(x.shape), dimensions))
    return codes, stored(1 / scale, dimensions)


def dequantize(
    codes: torch.Tensor, inverses: torch.Tensor, dimensions: int, format: int = fp8.E4M3
) -> torch.Tensor:
    """fp32 values of codes with inverse scales as stored."""
    rows, cols = codes.shape
    per_block = inverses.t()[:rows] if dimensions == 1 else inverses[:, : -(-cols // BLOCK)]
    return fp8.decode(codes, format) * spread(per_block, (rows, cols), dimensions)
