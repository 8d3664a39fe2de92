"""Compile a model: options, pass pipelines, plans and training steps."""
