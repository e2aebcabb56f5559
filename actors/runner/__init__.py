"""Runs step plans: batch state, forward pass, sampling."""
