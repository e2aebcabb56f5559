"""How it is started: command line, launch, Serve application."""
