"""The HTTP edge: sockets in, events to the core, commands from it, sockets out. Decides nothing."""
