"""Containers: where tensors lie in files of torch.save, safetensors, HDF5 and `.distcp`.

A container gives values and the extents of tensors, and writes shells. A format interprets them.

    zipdirectory.py   the members of a zip
    unpickle.py       reads a pickle as plain data; pickling.py writes one
    torchfile.py      reads files of torch.save; torchshell.py writes them
    torchtensors.py   the tensors in their pickles
    beginning.py      reads one number from the beginning of such a file
    safefile.py       reads and writes safetensors files
    hdf5file.py       reads HDF5 files; hdf5blocks.py checks them, hdf5shell.py writes them
    dcpfile.py        reads `.metadata` of torch.distributed.checkpoint, and checks it
    dcptable.py       its contents as columns: items, their boxes and places
    dcprows.py        objects in its pickle that become rows of these columns
    dcpitems.py       the item files beside it
    dcpnumbers.py     numbers of a few items, for many directories of one run
    dcpshell.py       writes such a directory
"""
