"""Which options do zckpt's own checkpoints understand?"""

from ...training.options import DTYPE, GROUP_DEFAULTS, MAX_FILE_SIZE, WEIGHTS_ONLY

OPTIONS = (WEIGHTS_ONLY, DTYPE, GROUP_DEFAULTS, MAX_FILE_SIZE)
REASONS = {"dp": "a universal checkpoint has no ranks"}
