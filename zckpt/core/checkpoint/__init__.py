"""What a checkpoint is: tensors, parameters, groups, states, and the ranks that saved it.

manifest.py           one checkpoint: entries, parameters, groups
entries.py            one complete tensor, wherever its pieces are
covering.py           checks that the fragments of every tensor have each element once
dtypes.py             element types; cast.py casts one to another
origin.py             the format of the files, and the number of ranks that saved them
facts.py              the engine that saved it, where its step is stored, how the model was cut
weights.py            which entries hold the values of a weight
states.py             which states an optimizer keeps, and which of them another checkpoint lacks
optimizer_states.py   the table of optimizer states that do not have the parameter's shape
missing_states.py     finds parameters that lack a state which other parameters have
unlisted.py           finds weights that no optimizer lists
wrapper.py            finds tensors next to the optimizer's state dict
agreement.py          decides which step is true if several files or ranks state a step
layers.py             the layer and the kind of a parameter, by its name
keys.py               dictionary keys that may be numbers written as strings
inert.py              objects of classes that are never imported
grid.py               a rank's place among pipeline stages and tensor ranks
slicing.py            tensors that are cut over ranks, as blocks of complete tensors
placement.py          which part of a tensor each rank of an axis has
siblings.py           files beside the checkpoint that a conversion copies along
mended.py             the values that `zckpt mend` restored
"""
