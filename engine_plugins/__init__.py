"""What knows engines: their wire formats, how they render prompts, how they are started.

Pure but for the files that a renderer reads. Only connectors that run inside an engine may import
it.
"""
