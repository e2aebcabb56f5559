"""Warmroot: LLM serving on Ray that sends each request to the replica where its prefix is still warm."""
