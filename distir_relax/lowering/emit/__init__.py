"""Programs of the ranked stage as code: torch modules, Relax functions, bundles."""
