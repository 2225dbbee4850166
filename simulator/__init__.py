"""Simulated engines: one pure model, driven on real sockets or in virtual time.

`blocks` and `engine` are the model and do no I/O; `event_wire` and `openai_wire` put it into the
engine's own formats; `publisher` and `server` are the sockets. Nothing here routes: a simulated
engine stands where a real one would.
"""
