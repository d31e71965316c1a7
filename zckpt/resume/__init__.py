"""A run goes on by itself, at the number of processes that it has now: `zckpt.auto_resume`.

runs.py             which checkpoints a run has, the newest first
fitting.py          what the next run asks for, and which conversion makes one fit
check.py            the report of `zckpt check`
listing.py          in which state each checkpoint of a run is; `zckpt list`
cache.py            the run for other sizes in RUN/.zckpt: locks, and what stays there
resuming.py         what they do until all have a path
auto.py             `auto_resume`: who shares the work
"""
