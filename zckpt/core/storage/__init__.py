"""Files, places in them and checksums: how are they opened, watched, read and written?

sources.py        opens, lists and watches the files of a source
byte_sources.py   files that have no bytes here: in a store, or in a directory of another node
corrections.py    bytes of files that are read with other values
times.py          files whose times are not those of their save
filenames.py      numbers in the names of files, and names that lead out of a folder
inventory.py      which files there are, whose they are, and which are missing
unfinished.py     is a target complete that was being written, or sent to a store?
fileio.py         reads and writes of files
fragments.py      where the elements of a tensor lie: extents, runs, boxes
sequences.py      sequences of what is made when it is asked for
records.py        do bytes have the CRC-32 that their file states? checksum.py
folder.py         the directory that a target is written to, which others may have prepared
marks.py          which directories zckpt has written
"""
