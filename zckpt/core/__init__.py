"""Elements and bytes: what a checkpoint is, how it is read and compared. No engine, no container.

What a checkpoint is:
    manifest.py       one checkpoint: entries, parameters, groups
    origin.py         where its tensors come from: files of which format, of how many ranks
    fragments.py      where the elements of a tensor lie: extents, runs, boxes
    sequences.py      sequences of what is made when it is asked for
    covering.py       do the fragments of every tensor have each element once?
    slicing.py        tensors that are cut over ranks, as boxes of whole ones
    grid.py           which place a rank has among stages and tensor ranks
    placement.py      what the ranks of an axis have of a whole: by it, merge.py and split.py work
    facts.py          which engine wrote a checkpoint, where its step stands, how it cut the model
    weights.py        what stands for a weight
    entries.py        one whole tensor, wherever its pieces are
    states.py         which states an optimizer keeps, and which of them another checkpoint lacks;
                      optimizer_states.py: the table of those that are no such tensors
    agreement.py      which step is true, if several places state one
    wrapper.py        tensors around its state dict
    missing_states.py which parameters lack a state that others have
    unlisted.py       which weights no optimizer lists
    layers.py         which layer and kind a parameter is
    keys.py           keys of dictionaries that may be texts of numbers
    inert.py          objects of classes that are never imported
    version.py        the version of zckpt
    grouping.py       what belongs together, by a key, its size or its place
    dtypes.py         element types, and cast.py between them

How a source is read:
    sources.py        opens, lists and watches its files; elsewhere.py: files without their bytes
    corrections.py    bytes of files that are read with other values; mended.py: who has done so
    times.py          files whose times are not those of their save
    inventory.py      which files there are, whose they are, and which are missing
    siblings.py       the files beside it that are copied along
    unfinished.py     is a target complete that was being written, or sent to a store?
    filenames.py      numbers in the names of files, and names that lead out of a folder
    fileio.py         reads and writes of files
    pieces.py         elements from files into a buffer
    duplicates.py     whether one file is a copy of another one
    records.py        do bytes have the CRC-32 that their file states? checksum.py
    streaming.py      one pass over tensors, with the threads and memory of resources.py
    pace.py           a line a minute about it
    pooling.py        which tasks of a pass this process carries out
    loading.py        one tensor in memory
    description.py    what `inspect` prints; tensors by a glob

What a target gets from a source:
    plan.py           the join of two manifests
    layout.py         the files of a target before any tensor is copied
    folder.py         the directory that they are written to, which others may have prepared
    marks.py          which directories zckpt has written

How two checkpoints are compared:
    compare.py        finds what differs, difference.py by how much
    statistics.py     what one tensor's numbers are like
    masters.py        do the masters of one checkpoint round to its weights?
    replicas.py       are copies that ranks hold equal, and slices really slices?
    partition.py      how an engine cuts tensors, in the words of gather.py files

Start with manifest.py and fragments.py.
"""
