"""The staged trainer: from a YAML file to a trained model."""
