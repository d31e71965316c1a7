"""What DeepSpeed's engine keeps in its model and optimizer states, however a directory lays it out.

Shared by the formats `deepspeed` (a partition per rank) and `deepspeed_universal` (a file per
parameter); it is no format itself.

    directories.py    tags of both kinds in a run directory, and the trainer's files around them
    states.py         what model and optimizer states say of the run
    flats.py          the record of one flat buffer
    manifest.py       the manifest of it all
    engine.py         the engine that a target is written for
    hyper.py          what its optimizer needs and a source may lack
    target.py         what is decided before the first byte is written
"""
