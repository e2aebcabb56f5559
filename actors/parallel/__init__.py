"""How the processes of a gang talk: collectives between ranks, and plans and results between leader and ranks."""
