"""Which options do DeepSpeed's directories of ranks' files understand?"""

from ..deepspeed_states import options as shared

OPTIONS = (*shared.OPTIONS, *shared.OF_RANKS)
