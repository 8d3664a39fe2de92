"""Code generation from ranked programs: torch modules, Relax functions, bundles."""
