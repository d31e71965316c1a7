"""PyTorch's own checkpoints: FSDP1, FSDP2, plain torch, ZeroRedundancyOptimizer.

    tree.py               state dicts whose tensors are leaves: where their bytes lie
    state.py              what state dicts mean: model, optimizer, groups, steps; the manifest
    matching.py           names for an optimizer that knows its parameters by number alone
    dcp.py                format `dcp`: torch.distributed.checkpoint's directories, read
    hf.py                 Hugging Face's storage of it, safetensors without an index
    gathered.py           format `gathered`: files of torch.save, whole or one per rank, read
    ranked.py             ShardedTensor and DTensor in the files of ranks
    zro.py                which parameters ZeroRedundancyOptimizer gives to which rank
    state_dicts.py        a manifest as the state dicts that programs save
    dcp_writing.py        directories of torch.distributed.checkpoint
    gathered_writing.py   whole files that plain torch loads

Facts in this package are of torch 2.13.0 unless said otherwise.
"""
