"""Several processes, on one node or on many, that share one command.

    launcher.py    this process's rank among those of torchrun, srun or mpirun
    store.py       a store of torch.distributed, through which they communicate
    group.py       the messages that they exchange
    ranks.py       makes all ranks do what rank 0 decides, or fail with its error
    sharing.py     how they share a conversion, or the comparison of `verify`

Every process reads the metadata by itself. Small messages (JSON) pass through the store. Tensors go
from the source to the target in the process that writes them, and each notes what it has written in
its journal (copying/journals.py). The ranks of `verify --gather`, which send tensors to each other,
use a process group of their own (proof/allgather/world.py).
"""
