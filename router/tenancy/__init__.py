"""Who may ask for what, and how much of it: keys, principals, rate limits, the audit log."""
