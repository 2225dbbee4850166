"""What knows engines: their wire formats, how they render prompts, how they are started.

Pure, but for the files that a renderer reads, and for what runs beside or inside an engine: the
registrar and its supervisor, the plugin and the connectors. The latter two are the only ones that
import vLLM.
"""
