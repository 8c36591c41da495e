"""Statistics by their definitions, in float64 torch."""

import math

import torch

ALL = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")


def reference(*parts: torch.Tensor) -> dict[str, float]:
    """Returns the statistics of the elements of all parts together."""
    x = torch.cat([part.detach().cpu().double().flatten() for part in parts])
    magnitudes = x.abs()
    nonzero = magnitudes[magnitudes != 0]
    amax = magnitudes.max()
    spread = amax.log2() - nonzero.min().log2() if len(nonzero) else torch.tensor(math.nan)
    return {
        "min": x.min().item(),
        "max": x.max().item(),
        "mean": x.mean().item(),
        "std": x.std().item() if len(x) > 1 else math.nan,
        "l1_norm": magnitudes.sum().item(),
        "l2_norm": x.square().sum().sqrt().item(),
        "cur_amax": amax.item(),
        "dynamic_range": spread.item(),
    }


def assert_statistics(found: dict[str, float], expected: dict[str, float]) -> None:
    """Asserts sums and norms within 1e-6, std within 1e-4, min, max and amax exactly.

    Terms of either sign cancel in a mean, so its bound is relative to the amax.
    """
    assert set(found) <= set(expected)
    for name, value in found.items():
        bound = {"std": 1e-4, "min": 0.0, "max": 0.0, "cur_amax": 0.0}.get(name, 1e-6)
        least = 1e-9 * (bound > 0)
        if name == "mean":
            least = 1e-8 * max(1.0, expected["cur_amax"])
        close = math.isclose(value, expected[name], rel_tol=bound, abs_tol=least)
        both_nan = math.isnan(value) and math.isnan(expected[name])
        assert close or both_nan, f"{name}: {value} instead of {expected[name]}"
