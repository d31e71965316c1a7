"""python -m zckpt, so that torchrun and srun can start it."""

from .cli import main

if __name__ == "__main__":
    main()
