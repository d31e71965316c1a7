"""PyTorch's own checkpoints: FSDP1, FSDP2, plain torch, ZeroRedundancyOptimizer.

    tree.py               state dicts whose tensors are leaves: where their bytes lie
    finding.py            which of them are the model's and the optimizer's
    names.py              the model's name of every parameter that an optimizer knows
    matching.py           names for numbers: the one way in which shapes fit
    twins.py              tensors that hold the same, as tied weights do
    state.py              the manifest of it all: groups, steps, frozen weights, buffers
    dcp.py                format `dcp`: torch.distributed.checkpoint's directories, read
    dcp_items.py          the same by key, each item read when it is asked for
    hf.py                 Hugging Face's storage of it, safetensors without an index
    gathered.py           format `gathered`: files of torch.save, whole or one per rank, read
    ranked.py             ShardedTensor and DTensor in the files of ranks
    zro.py                which parameters ZeroRedundancyOptimizer gives to which rank
    state_dicts.py        a manifest as the state dicts that programs save
    dcp_writing.py        directories of torch.distributed.checkpoint
    gathered_writing.py   whole files that plain torch loads

Facts in this package are of torch 2.13.0 unless said otherwise.
"""
