"""Several processes, on one node or on many, that share one command.

    launch.py      which process is this, and of how many: torchrun, srun and mpirun say it
    meeting.py     where the processes meet: a store of torch.distributed
    tcpstore.py    such a store, reached without torch
    calls.py       calls to that store, which end even if its host hangs
    joining.py     which keys of the store are those of this command; each rank joins once
    group.py       what they tell each other: that they live, that one has failed, who is next
    failures.py    why a process has failed, as it tells the others
    handover.py    the manifests that rank 0 has read, as bytes for the others
    conversion.py  one conversion by all: rank 0 leads, all write
    passes.py      verify, diff and stats by all: rank 0 leads, all read

Only small messages pass through the store. Tensors go from the source to the target in the process
that writes them, and what each has written stands in its journal (copying/journals.py).
"""
