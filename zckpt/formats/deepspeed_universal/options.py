"""Which options do DeepSpeed's universal checkpoints understand?"""

from ..deepspeed_states.options import OPTIONS as OPTIONS
