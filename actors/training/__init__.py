"""Training of what drafts: heads and small models that learn from what the model itself writes."""
