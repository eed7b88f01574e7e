"""The engines: how a plan is carried out on each runtime."""
