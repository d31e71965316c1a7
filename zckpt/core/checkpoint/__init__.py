"""What a checkpoint is: tensors, parameters, groups, states, and the ranks that saved it.

manifest.py           one checkpoint: entries, parameters, groups
entries.py            one whole tensor, wherever its pieces are
covering.py           do the fragments of every tensor have each element once?
dtypes.py             element types; cast.py: from one to another
origin.py             where its tensors come from: files of which format, of how many ranks
facts.py              which engine wrote it, where its step stands, how it cut the model
weights.py            what stands for a weight
states.py             which states an optimizer keeps, and which of them another checkpoint lacks
optimizer_states.py   the table of those states that are no tensors of the parameter's shape
missing_states.py     which parameters lack a state that others have
unlisted.py           which weights no optimizer lists
wrapper.py            tensors around the optimizer's state dict
agreement.py          which step is true, if several places state one
layers.py             which layer and kind a parameter is
keys.py               keys of dictionaries that may be texts of numbers
inert.py              objects of classes that are never imported
grid.py               which place a rank has among stages and tensor ranks
slicing.py            tensors that are cut over ranks, as boxes of whole ones
placement.py          what the ranks of an axis have of a whole
siblings.py           the files beside it that are copied along
mended.py             which of its values `zckpt mend` restored
"""
