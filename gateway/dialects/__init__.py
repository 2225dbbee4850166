"""What the bodies of chat, completions, responses and messages say, and what is changed in them."""
