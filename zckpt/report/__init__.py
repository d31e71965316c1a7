"""What does a checkpoint look like? A document of numbers, and a page that shows it.

The document is plain JSON. The folder page/ shows it and knows nothing else.
"""
