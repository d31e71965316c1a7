"""Reads the older kind of directories, `mp_rank_*`: one folder for each model-parallel rank.

directories.py     reads a directory: joins the ranks' tensors to one model
ranks.py           lists the folders and their ranks
cuts.py            how tensor ranks cut parameters
"""
