"""Cost models: op rooflines, collectives on networks, machine profiles."""
