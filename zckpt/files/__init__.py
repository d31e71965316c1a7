"""Containers: where tensors lie in files of torch.save, safetensors, HDF5 and `.distcp`.

A container's reader gives values and the byte ranges of tensors; its writer makes files without
tensor data, which is filled in later. The meaning of keys is left to the formats.

    zipdirectory.py   the members of a zip
    unpickle.py       reads a pickle as plain data; pickling.py writes one
    torchfile.py      reads files of torch.save; torchshell.py writes them
    torchtensors.py   the tensors in the pickles of torch.save
    beginning.py      reads one number from the beginning of a file of torch.save
    safefile.py       reads and writes safetensors files
    hdf5file.py       reads HDF5 files; hdf5blocks.py checks them, hdf5shell.py writes them
    dcpfile.py        reads `.metadata` of torch.distributed.checkpoint, and checks it
    dcptable.py       the contents of `.metadata` as columns: items, their chunks and locations
    dcprows.py        fills these columns directly while the pickle is read
    dcpitems.py       the item files beside `.metadata`
    dcpnumbers.py     numbers of a few items, for many directories of one run
    dcpshell.py       writes a directory of torch.distributed.checkpoint
"""
