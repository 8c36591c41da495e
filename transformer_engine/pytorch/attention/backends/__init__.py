"""Attention backends. Each file has one function `attend(query, key, value, ...)`.

query is `[batch, heads, queries, size]`, key and value are `[batch, groups, keys, size]` (any
strides, heads = groups * heads per group), and the result is `[batch, heads, queries, size of
value]`, in whatever layout is natural to the backend. `sink` is `[heads]`, see `sink.py`. A query
that sees no key has a result of zero, and passes no gradient.
"""
