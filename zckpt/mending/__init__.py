"""The command `mend`: what can still be saved of a damaged checkpoint? It writes a corrected copy.

diagnosis.py    what is damaged, as the readers and the checksums of `verify` say
explaining.py   which bytes were there before: one damaged record at a time
witnesses.py    other bytes that confirm an explanation, or that contradict it
containers.py   damaged members of a file whose reader refuses the file
zips.py         which bit was flipped in the headers and the directory of a zip
stated.py       files whose checksum must be checked before a reader can open them
losses.py       which elements lost files had, and which of them other files still have
alike.py        lost files whose bytes are those of all other ranks' files
rebuilding.py   what may take the place of lost values, if the user types `--rebuild`
prospect.py     what `mend` would give, for the last line of `verify`, `report` and errors
mend.py         the report, and the copy

Nothing here searches for damage by rules of its own: damage is what a reader refuses, and what a
comparison of all bytes finds. The source is never changed: readers see it through
`core/storage/corrections.py`.
"""
