"""The engine: scheduler, requests and step plans. Pure Python, no torch, no ray."""
