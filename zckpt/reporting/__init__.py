"""What does a checkpoint look like? A document of numbers, and a page made of that alone.

page/           HTML, SVG and Markdown from the document
"""
