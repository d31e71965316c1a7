"""The command `mend`: finds what is damaged in a checkpoint, and writes a corrected copy.

diagnosis.py    what is damaged, as the readers and the checksums of `verify` say
explaining.py   the original bytes of one damaged record, by its checksum
witnesses.py    other bytes that confirm a correction, or that contradict it
containers.py   damaged members of a file whose reader refuses the file
zips.py         which bit was flipped in the headers and the directory of a zip
stated.py       files whose checksum must be compared before a reader can open them
losses.py       which elements lost files had, and which of them other files still have
rounding.py     whether masters show lost weights; other pipeline stages' replicas of lost states
alike.py        lost files whose bytes are those of all other ranks' files
rebuilding.py   what may take the place of lost values, if the user types `--rebuild`
prospect.py     what `mend` would restore, for the last line of `verify`, `report` and errors
mend.py         the report, and the copy

This package has no rules of its own for what is damaged: damage is what a reader refuses, and what
a comparison of all bytes with their checksums finds. The source is never changed: readers get its
bytes with the corrections applied (`core/storage/corrections.py`).
"""
