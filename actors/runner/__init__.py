"""Runs step plans on a model: sequence state, packed batches, sampling."""
