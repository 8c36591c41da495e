"""Built models that ranks are to share: their layers, their parameters, their checkpoints.

parallelize.py   what each layer of a model becomes on a mesh
remake.py        a layer becomes one that ranks share
parameters.py    whole parameters and the parts that a rank has of them
checkpoints.py   states of models and optimizers for `torch.distributed.checkpoint`
clip.py          the norm of gradients, and clipping
"""
