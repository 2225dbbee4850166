"""From a body to token ids, once: rendering, tokenising, what is remembered, where turns diverge."""
