"""Context parallelism: attention of sequences whose tokens are spread over the ranks of a group.

A sequence is cut into `2 * ranks` chunks, and rank r has the chunks r and `2 * ranks - 1 - r`, so
that causal masks give all ranks the same work. A rank computes attention in parts, each with the
keys that it has at the time. Parts run on the same backends as attention on one rank, and their
results are merged by their log-sum-exp.

    group.py         the ranks, and which calls they refuse
    schemes.py       the choice among ring, gather and heads
    tensors.py       checks of masks, biases and sequences before anything is sent
    score_blocks.py  which queries see which keys, as blocks of the score matrix; only integers
    lengths.py       sequences of a part: lengths without padding, and positions in memory
    parts.py         forward and backward of a part
    merging.py       sums over parts: the result, and the gradients
    attend.py        attention over all parts, forward and backward
    ring.py          p2p: keys and values pass round a ring
    gather.py        all_gather: every rank gathers all keys and values
    codes.py         FP8: the casts around ring and gather, which then send FP8 codes
    heads.py         a2a: every rank gets all tokens of some heads; a2a+p2p: a ring of such groups
    settings.py      the arguments of `set_context_parallel_group`
"""
