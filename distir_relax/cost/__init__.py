"""What ops and collectives cost: rooflines of ops, collectives on networks, profiles of machines."""
