"""How are the files of torch.distributed.checkpoint called?"""

METADATA = ".metadata"
ITEMS = ".distcp"
