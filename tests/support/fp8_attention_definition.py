"""FP8 attention computed in parts, as formulas on one sequence, without code of the package.

In the forward, the softmax weights of each part are cast before the results of the parts are
merged. In the backward, the weights are cast after that: with the log-sum-exps of all parts.
"""

from dataclasses import dataclass, field

import torch

CASTS = ("qkv", "softmax", "out", "grad_out", "grad_product", "grad_qkv")


@dataclass
class Casts:
    """Casts tensors with scales by name, and records the amax of each name. `skip` is not cast."""

    scales: dict
    skip: str = ""
    amaxes: dict = field(default_factory=lambda: dict.fromkeys(CASTS, 0.0))

    def __call__(self, name, x, record=True):
        if record:
            self.amaxes[name] = max(self.amaxes[name], float(x.abs().max()))
        if name == self.skip:
            return x
        kind = torch.float8_e5m2 if name.startswith("grad") else torch.float8_e4m3fn
        scale, largest = self.scales[name], torch.finfo(kind).max
        return (x * scale).clamp(-largest, largest).to(kind).float() * (1 / scale)


def attention(inputs, grad, hidden, owners, sink, casts):
    """Returns the result and the gradients of query, key, value, and of the sink if there is one.

    Args:
        inputs: query `[heads, queries, size]`, key and value `[groups, keys, size]`.
        grad: gradient of the result.
        hidden: bool `[queries, keys]`, True for keys that a query does not see.
        owners: int `[keys]`, the part to which each key belongs.
        sink: None, or the scores `[heads]` of a key without a value, which counts as one more part.
        casts: the scales.
    """
    query, key, value = (casts("qkv", x) for x in inputs)
    factor, repeats = query.shape[-1] ** -0.5, query.shape[0] // key.shape[0]
    key, value = (x.repeat_interleave(repeats, 0) for x in (key, value))
    scores = (query @ key.mT * factor).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        lse = torch.logaddexp(lse, sink[:, None, None])
    exact = 0.0
    for owner in owners.unique():
        part = scores.masked_fill(owners != owner, -torch.inf)
        own = part.logsumexp(-1, keepdim=True)
        weights = casts("softmax", torch.exp(part - own).nan_to_num(0.0))
        exact = exact + torch.exp(own - lse) * (weights @ value)
    out = casts("out", exact)

    grad = casts("grad_out", grad)
    weights = torch.exp(scores - lse)
    grad_value = casts("softmax", weights, record=False).mT @ grad
    mean = (grad * exact).sum(-1, keepdim=True)
    product = casts("grad_product", weights * (grad @ value.mT - mean) * factor)
    summed = [x.unflatten(0, (-1, repeats)).sum(1) for x in (product.mT @ query, grad_value)]
    found = [out, *[casts("grad_qkv", x) for x in (product @ key, *summed)]]
    if sink is not None:
        found.append(-(torch.exp(sink[:, None, None] - lse) * mean).sum((1, 2)))
    return found
