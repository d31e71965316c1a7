"""Reads and writes checkpoints in object stores (`s3://`, `gs://`, `az://`, `https://`, `hf://`).

A program can also pass its own store. To read a checkpoint, this package creates a local folder of
empty files with the names and sizes of the objects: a mirror. The other packages read it like any
folder, and `core/storage/byte_sources.py` fetches the bytes that they ask for. A target is written
to a local folder and then uploaded. Its last file is sent when all others have arrived.

    urls.py       the store and the key of a URL
    stores.py     list, read and upload objects: by obstore, fsspec, and for the Hugging Face Hub
    failures.py   explains a store's refusal in one sentence
    mirror.py     the folder of empty files, and how their bytes are fetched and cached
    upload.py     where a target is written on this machine, and whether its URL is free
    sending.py    sends a target, compares it with the stored objects, and sends its last file
    cleanup.py    removes the objects of a run that was stopped
    url_arguments.py  makes a function that takes paths accept URLs
"""
