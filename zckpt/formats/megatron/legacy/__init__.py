"""The older kind of directories, `mp_rank_*`: one folder for each model-parallel rank.

directories.py     reads a directory: joins its folders to one model
ranks.py           the folders and their ranks
cuts.py            how tensor ranks cut parameters
"""
