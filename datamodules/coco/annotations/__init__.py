"""Reads COCO's annotation files: checks the entries and packs them into flat arrays.

Every worker would get its own copy of hundreds of thousands of Python objects, since even reading
one changes its reference count; all workers share arrays that are mapped from a file. Any value may
be anywhere in an annotation file; damaged entries are left out here, by name, before training.

Format: https://cocodataset.org/#format-data
"""
