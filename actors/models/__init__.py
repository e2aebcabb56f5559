"""Decoder and weight loading."""
