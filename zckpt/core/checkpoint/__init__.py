"""What a checkpoint is: tensors, parameters, groups, states, and the ranks that saved it.

manifest.py           one checkpoint: entries, parameters, groups
entries.py            one complete tensor, wherever its pieces are
covering.py           checks that the fragments of every tensor have each element once
dtypes.py             element types; cast.py casts one to another
origin.py             the format of the files, and the number of ranks that saved them
facts.py              the engine that wrote it, the place of its step, and how it cut the model
weights.py            which entries hold the values of a weight
states.py             which states an optimizer keeps, and which of them another checkpoint lacks
optimizer_states.py   the table of those states that are no tensors of the parameter's shape
missing_states.py     finds parameters that lack a state which others have
unlisted.py           finds weights that no optimizer lists
wrapper.py            finds tensors around the optimizer's state dict
agreement.py          decides which step is true if several places state one
layers.py             the layer and the kind of a parameter, by its name
keys.py               keys of dictionaries that may be texts of numbers
inert.py              objects of classes that are never imported
grid.py               a rank's place among pipeline stages and tensor ranks
slicing.py            tensors that are cut over ranks, as boxes of complete ones
placement.py          which part of a tensor each rank of an axis has
siblings.py           the files beside it that are copied along
mended.py             the values that `zckpt mend` restored
"""
