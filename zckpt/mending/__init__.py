"""What can still be saved of a damaged checkpoint? A copy with corrected bytes is written.

    diagnosis.py    what is damaged, as the readers and the checksums of `verify` say
    explaining.py   which bytes were there before: one damaged record at a time
    witnesses.py    other bytes that confirm an explanation, or that contradict it
    containers.py   checksums of a zip that its reader checks before anything is known
    zips.py         which bit was flipped in what a zip says of its members
    stated.py       checksums of descriptions and headers, which readers need first
    losses.py       what lost files had, and what of it is left elsewhere
    alike.py        lost files whose bytes all other ranks have
    rebuilding.py   what may take the place of lost values, if the user types it
    mend.py         the report, and the copy

Nothing is found out here: damage is what a reader refuses, and what a comparison of all bytes
finds. The source is never changed: readers see it through `core/storage/corrections.py`.
"""
