"""Commands; each file is one of them, and parses what a function of the library then does."""
