"""What runs in a replica: the engine, the model, and the Ray actors that host them."""
