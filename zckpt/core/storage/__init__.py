"""Opens, watches, reads and writes files; places of bytes in them, and checksums.

sources.py        opens, lists and watches the files of a source
byte_sources.py   files whose bytes lie elsewhere: in a store, or in a directory of another node
corrections.py    reads files with some bytes replaced by corrected values
times.py          finds files that were not written together with the rest of their save
filenames.py      numbers in names of files, names that lead out of a folder, folders above a path
inventory.py      which files there are, which rank each belongs to, and which are missing
names_alone.py    directories with the names of a checkpoint's files, and no data
unfinished.py     whether a target is complete, or still being written or sent to a store
fileio.py         reads and writes files
fragments.py      where the elements of a tensor lie: byte ranges, and blocks of any shape
sequences.py      sequences whose items are made when they are read
records.py        checks bytes against the CRC-32 that their file states; checksum.py computes it
folder.py         the directory that a target is written to, in which other users may have files
marks.py          which directories zckpt has written
"""
