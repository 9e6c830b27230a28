"""Lookup, save, load: pure state machines that say which call of the store comes next."""
