"""Context parallelism: attention of sequences whose tokens are spread over the ranks of a group.

A sequence is cut into `2 * ranks` chunks, and rank r has chunks r and `2 * ranks - 1 - r`: so
causal masks leave all ranks the same work. What one rank holds of the keys at a time is a part of
those that its queries see. Parts run on the backends that serve attention without ranks; results
are merged by their log-sum-exp.

    group.py     the ranks, and what they cannot do
    spans.py     which queries of a side see which keys of another, as parts: integers alone
    lengths.py   real lengths and places of the sequences of a part, where there is padding
    parts.py     calls of parts, merging, and their gradients
    ring.py      p2p: keys and values pass round a ring
    gather.py    all_gather: every rank gets all keys and values
    heads.py     a2a: every rank gets all tokens of some heads; a2a+p2p: a ring of such groups
    order.py     from the tokens of each rank to those of a sequence, and back
"""
