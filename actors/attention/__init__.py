"""Attention behind one interface, with flash-attention's contract."""
