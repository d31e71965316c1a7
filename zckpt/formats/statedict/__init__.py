"""Reads and writes PyTorch state dicts; shared by the formats `dcp` and `gathered`.

    tree.py        state dicts in which each tensor is replaced by its byte ranges in files
    weights.py     the same for weights in safetensors files
    keys.py        the keys under which a program saves state dicts
    state_dict_search.py  finds the state dicts of the model and of the optimizer
    roots.py       pairs models with their optimizers
    names.py       the model's name of every parameter in an optimizer
    matching.py    names for parameters that an optimizer numbers
    equal_tensors.py  tensors of equal bytes, such as tied weights
    refusals.py    state dicts that are refused because of their keys or shapes
    slices.py      values that differ between ranks: slices, or values that each rank keeps
    own_facts.py   validates the facts that zckpt wrote beside state dicts
    read.py        chooses and names state dicts, and makes their manifest
    building.py    builds the manifest: groups, steps, frozen weights, buffers
    write.py       turns a manifest into the state dicts that programs save
    gather.py      torch's own rule for names of saved tensors; checks read.py, shares no code

Facts in this package are of torch 2.13.0 unless said otherwise.
"""
