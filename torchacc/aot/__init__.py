"""Compile a training step for accelerators that are not there, and read what their compiler made of it."""
