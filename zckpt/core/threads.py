from .streaming import share as share
