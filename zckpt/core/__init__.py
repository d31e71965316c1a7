"""Elements and bytes: what a checkpoint is, and how its bytes move. Knows no engine, no container.

    manifest.py       one checkpoint: entries, parameters, groups
    fragments.py      where the elements of a tensor lie: extents, runs, boxes
    facts.py          which engine wrote a checkpoint, where its step stands; the grid of ranks
    weights.py        what stands for a weight
    inert.py          objects of classes that are never imported
    dtypes.py         element types, and cast.py between them; checksum.py
    fileio.py         reads and writes of files
    pieces.py         elements from files into a buffer; records.py and hashing.py check them
    streaming.py      one pass over tensors, with the threads and memory of resources.py
    plan.py           the join of two manifests
    copy.py           fills a target
    compare.py        finds what differs, difference.py by how much
    partition.py      how an engine cuts tensors, in the words of gather.py files
    buckets.py        which blocks of such tensors one all-gather brings back
    expected.py       how a missing file or rank is reported
    patterns.py       tensors by a glob
    staging.py        a target appears whole or not at all
    sharing.py        which regions of a target this process writes, pooling.py which tasks it reads
    journal.py        which regions are complete; journals.py of several processes
    convert.py        the five steps of a conversion
    loading.py        one tensor in memory
    description.py    what `inspect` prints

Start with manifest.py and fragments.py.
"""
