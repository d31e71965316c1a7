"""The older kind of directories, `mp_rank_*`: one folder for each model-parallel rank.

directories.py     a directory, from its folders to one model
ranks.py           the folders, and which rank each is
cuts.py            how tensor ranks cut parameters
"""
