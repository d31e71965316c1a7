"""Containers: where tensors lie in files of torch.save, safetensors, HDF5 and `.distcp`.

A container gives values and the extents of tensors, and writes shells; what they mean is a format's
business.

    zipdirectory.py   the members of a zip
    unpickle.py       a pickle as plain data; pickling.py is the way back
    torchfile.py      files of torch.save; torchshell.py writes them
    torchtensors.py   the tensors in their pickles
    beginning.py      a number in such a file, for which it is read from its beginning
    safefile.py       safetensors files, read and written
    hdf5file.py       HDF5 files; hdf5blocks.py checks them, hdf5shell.py writes them
    dcpfile.py        `.metadata` of torch.distributed.checkpoint, read and compared with itself
    dcptable.py       what it says: items, their boxes and places, as columns
    dcprows.py        forms in its pickle that become rows of these columns
    dcpitems.py       the item files beside it
    dcpnumbers.py     numbers of a few items, read of many directories of one run
    dcpshell.py       writes such a directory
"""
