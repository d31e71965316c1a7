"""What state dicts of PyTorch mean; shared by the formats `dcp` and `gathered`.

    tree.py        state dicts whose tensors are leaves: where their bytes lie
    weights.py     weights in safetensors files, as leaves
    keys.py        under which keys a program saves them
    state_dict_search.py  which state dicts are the model's and the optimizer's
    roots.py       which optimizer trains which model, if there are several
    names.py       the model's name of every parameter that an optimizer knows
    matching.py    names for parameters that an optimizer knows by number
    equal_tensors.py  tensors of equal bytes, as tied weights have
    refusals.py    what is refused by its sign, whatever the container
    slices.py      what differs between ranks: slices, or what each rank has for itself
    own_facts.py   whether what zckpt stated beside them has zckpt's own form
    read.py        which of them are read, and under which names
    building.py    the manifest: groups, steps, frozen weights, buffers
    write.py       a manifest as the state dicts that programs save
    gather.py      torch's own names for saved tensors, apart from all others: it proves read.py

Facts in this package are of torch 2.13.0 unless said otherwise.
"""
