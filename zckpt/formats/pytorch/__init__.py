"""PyTorch's own checkpoints: FSDP1, FSDP2, plain torch, ZeroRedundancyOptimizer.

    tree.py         state dicts whose tensors are leaves: where their bytes lie, wherever that is
    state.py        what state dicts mean: model, optimizer, groups, steps; the manifest
    matching.py     names for an optimizer that knows its parameters by number alone
    dcp.py          format `dcp`: torch.distributed.checkpoint's directories, read
    gathered.py     format `gathered`: files of torch.save, whole or one per rank, read
    ranked.py       ShardedTensor and DTensor in the files of ranks
    zro.py          which parameters ZeroRedundancyOptimizer gives to which rank

Facts in this package are of torch 2.13.0 unless said otherwise.
"""
