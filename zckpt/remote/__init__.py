"""Checkpoints in object stores: `s3://`, `gs://`, `az://`, `https://`, `hf://`, a program's own.

A source is laid out on this machine as a folder of empty files that have the names and the sizes of
the objects. All other rooms read it as any folder, and `core/storage/byte_sources.py` gives them
the bytes. A target is written on this machine and then sent, its last file only when all others are
there.

    urls.py       which store and which key a URL means
    stores.py     what a store can do: list, read ranges, put; obstore's, fsspec's, the Hub's
    failures.py   what a store's refusal means, in one sentence
    mirror.py     the folder of empty files, and the bytes of each
    upload.py     where a target is written first, and whether it may be
    sending.py    a target is sent, checked and committed
    cleanup.py    what a dead run has left, and its removal
    url_arguments.py  a function that takes paths takes URLs
"""
