"""Several processes, on one node or on many, that share one command.

    launcher.py    which process is this, and of how many: torchrun, srun and mpirun say it
    store.py       where they meet: a store of torch.distributed
    group.py       what they tell each other
    ranks.py       all ranks do what rank 0 decides, or fail with its error
    sharing.py     how they share a conversion, or the comparison of `verify`

Every process reads the metadata by itself. Small messages (JSON) pass through the store. Tensors go
from the source to the target in the process that writes them, and what each has written stands in
its journal (copying/journals.py). The ranks of `verify --gather`, which send tensors to each other,
meet by themselves (proof/allgather/world.py).
"""
