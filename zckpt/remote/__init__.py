"""Checkpoints in object stores: `s3://`, `gs://`, `az://`, `https://`, `hf://`, a program's own.

A source is laid out on this machine as a folder of empty files with the names and the sizes of the
objects. All other rooms read it like any folder, and `core/storage/byte_sources.py` provides the
bytes. A target is written on this machine and then sent. Its last file is sent when all others have
arrived.

    urls.py       the store and the key of a URL
    stores.py     the operations of a store: list, read ranges, put; obstore's, fsspec's, the Hub's
    failures.py   explains a store's refusal in one sentence
    mirror.py     the folder of empty files, and the bytes of each
    upload.py     where a target is written first, and whether it may be
    sending.py    sends a target, checks it and commits it
    cleanup.py    removes the remains of a dead run
    url_arguments.py  makes a function that takes paths accept URLs
"""
