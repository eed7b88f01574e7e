"""Checkpoints that load at any number of devices and in any engine."""
