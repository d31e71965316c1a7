"""The meaning of PyTorch state dicts; shared by the formats `dcp` and `gathered`.

    tree.py        state dicts with leaves for tensors: the places of their bytes
    weights.py     weights in safetensors files, as leaves
    keys.py        the keys under which a program saves state dicts
    state_dict_search.py  finds the state dicts of the model and of the optimizer
    roots.py       pairs models with their optimizers
    names.py       the model's name of every parameter in an optimizer
    matching.py    names for parameters that an optimizer numbers
    equal_tensors.py  tensors of equal bytes, such as tied weights
    refusals.py    state dicts that are refused by their keys or shapes, in any container
    slices.py      values that differ between ranks: slices, or each rank's own
    own_facts.py   validates the facts that zckpt stated beside state dicts
    read.py        chooses and names state dicts, and makes their manifest
    building.py    builds the manifest: groups, steps, frozen weights, buffers
    write.py       a manifest as the state dicts that programs save
    gather.py      torch's own names for saved tensors, independent of the rest: it proves read.py

Facts in this package are of torch 2.13.0 unless said otherwise.
"""
