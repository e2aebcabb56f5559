"""What is cached, and where: hashing, blocks, the radix tree, events, the bus and the global index."""
